// Oldest: the block files used longest ago, of any number that it is shown.
//
// Files are only ever used anew, so what was among the oldest at a look and
// hasn't been used since comes before everything else: evicting from here, the
// oldest first, is exact, however many files there are.
//
// Not thread-safe.
#ifndef CACHESTORE_POSIX_OLDEST_H_
#define CACHESTORE_POSIX_OLDEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "tier/geometry.h"

namespace cachestore {

struct OldFile {
  uint64_t used_ns = 0;  // last use
  BlockId block{};
  uint32_t identity = 0;  // the collector's number for it
  uint32_t size_4k = 0;   // size in units of 4096 bytes

  bool operator<(const OldFile& other) const {
    return std::tie(used_ns, block, identity) <
           std::tie(other.used_ns, other.block, other.identity);
  }
};

// Units of 4096 bytes that a file of that size takes.
inline uint32_t In4K(uint64_t size) {
  return static_cast<uint32_t>(std::min<uint64_t>((size + 4095) / 4096, UINT32_MAX));
}

class Oldest {
 public:
  explicit Oldest(size_t limit) : limit_(limit) {}

  void Show(const OldFile& file) {
    if (files_.size() < limit_) {
      files_.push_back(file);
      std::push_heap(files_.begin(), files_.end());
    } else if (file < files_.front()) {
      std::pop_heap(files_.begin(), files_.end());
      files_.back() = file;
      std::push_heap(files_.begin(), files_.end());
    }
  }
  // After the last Show: all of them, the most recently used first, to be taken
  // from the back.
  std::vector<OldFile> Take() {
    std::sort_heap(files_.begin(), files_.end());
    std::reverse(files_.begin(), files_.end());
    return std::exchange(files_, {});
  }
  void Clear() { files_.clear(); }

 private:
  const size_t limit_;
  std::vector<OldFile> files_;  // a heap, the most recently used one on top
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_OLDEST_H_
