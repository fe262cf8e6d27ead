#include "cache/held_page.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/aligned_buffer.h"
#include "fault_env.h"

namespace cachestore::test {

HeldPage::HeldPage(const uint8_t* bytes, size_t size) : bytes_(bytes, bytes + size) {
  mapped_ = AlignUp(size);
  if (size <= kAlignment) {
    reason_ = "a tensor of one page only";
    return;
  }
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    reason_ = std::string("mmap: ") + strerror(errno);
    return;
  }
  memory_ = static_cast<uint8_t*>(memory);
  memcpy(memory_, bytes, kAlignment);
  const int flags = O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY;
  fault_ = static_cast<int>(syscall(SYS_userfaultfd, flags));
  uffdio_api api = {};
  api.api = UFFD_API;
  uffdio_register range = {};
  range.range.start = reinterpret_cast<uintptr_t>(memory_) + kAlignment;
  range.range.len = mapped_ - kAlignment;
  range.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (fault_ < 0 || ioctl(fault_, UFFDIO_API, &api) != 0 ||
      ioctl(fault_, UFFDIO_REGISTER, &range) != 0) {
    reason_ = std::string("userfaultfd: ") + strerror(errno);
  }
}

HeldPage::~HeldPage() {
  if (fault_ >= 0) {
    (void)LetGo();
    close(fault_);
  }
  if (memory_ != nullptr) munmap(memory_, mapped_);
}

bool HeldPage::WaitTouched() {
  pollfd waited = {fault_, POLLIN, 0};
  const auto bound = std::chrono::duration_cast<std::chrono::milliseconds>(kWaitBound);
  return poll(&waited, 1, static_cast<int>(bound.count())) == 1;
}

bool HeldPage::LetGo() {
  std::vector<uint8_t> rest(mapped_ - kAlignment);
  std::copy(bytes_.begin() + static_cast<ptrdiff_t>(kAlignment), bytes_.end(), rest.begin());
  uffdio_copy copy = {};
  copy.dst = reinterpret_cast<uintptr_t>(memory_) + kAlignment;
  copy.src = reinterpret_cast<uintptr_t>(rest.data());
  copy.len = rest.size();
  return ioctl(fault_, UFFDIO_COPY, &copy) == 0;
}

}  // namespace cachestore::test
