#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace cachestore {
namespace {

std::atomic<uint32_t> forks{0};

void InChild() { forks.fetch_add(1); }

}  // namespace

uint32_t ForkCount() {
  static const int registered = pthread_atfork(nullptr, nullptr, &InChild);
  (void)registered;
  return forks.load();
}

}  // namespace cachestore
