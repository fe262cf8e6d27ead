"""What this process has open: threads, descriptors."""

import os

from rig.server import poll


def threads_and_descriptors():
    """The ids of this process's threads, and how many descriptors it has."""
    return set(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def comes_back_to(before):
    """Whether there is nothing beside ``before`` again. A joined thread is listed for a moment."""
    threads, descriptors = before

    def back():
        now_threads, now_descriptors = threads_and_descriptors()
        return now_threads <= threads and now_descriptors == descriptors

    return poll(back, 30, "threads and descriptors as before", interval=0.001)
