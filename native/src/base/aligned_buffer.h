// AlignedBuffer: page-aligned memory of a worker's own, made when first asked
// for and kept.
#ifndef CACHESTORE_BASE_ALIGNED_BUFFER_H_
#define CACHESTORE_BASE_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace cachestore {

// What O_DIRECT asks of addresses, offsets and lengths on every common device.
inline constexpr uint64_t kAlignment = 4096;

constexpr uint64_t AlignUp(uint64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

class AlignedBuffer {
 public:
  // At least `size` bytes, contents unspecified; null if there is no memory.
  uint8_t* Get(uint64_t size) {
    if (size > capacity_) {
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, AlignUp(size))));
      capacity_ = memory_ == nullptr ? 0 : AlignUp(size);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  uint64_t capacity_ = 0;
};

}  // namespace cachestore

#endif  // CACHESTORE_BASE_ALIGNED_BUFFER_H_
