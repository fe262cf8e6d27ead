// HeldPage: memory on which a copy stops half-way until the test lets it go: a
// page fault that userfaultfd(2) leaves open. So a process can be killed or
// stopped while one of its workers is in a copy, without a hook in the copy.
#ifndef CACHESTORE_TESTS_CACHE_HELD_PAGE_H_
#define CACHESTORE_TESTS_CACHE_HELD_PAGE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cachestore::test {

class HeldPage {
 public:
  // `size` bytes, more than 4096, that shall hold `bytes`; all behind the first
  // 4096 are missing.
  HeldPage(const uint8_t* bytes, size_t size);
  ~HeldPage();
  HeldPage(const HeldPage&) = delete;
  HeldPage& operator=(const HeldPage&) = delete;

  // Why it can't be had here; "" if it can.
  const std::string& reason() const { return reason_; }
  uint8_t* begin() const { return memory_; }
  // False if nobody touches what is missing in time.
  [[nodiscard]] bool WaitTouched();
  bool LetGo();

 private:
  const std::vector<uint8_t> bytes_;
  size_t mapped_ = 0;
  uint8_t* memory_ = nullptr;
  int fault_ = -1;
  std::string reason_;
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_HELD_PAGE_H_
