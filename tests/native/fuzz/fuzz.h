// Fuzz targets: one *_fuzz.cc each, named after what it reads, with a corpus in
// corpus/<name>/.
//
// In the default test run each is a program of its own, fuzz_<name>, that takes
// the corpus and some thousand mutations of it (fuzz_main.cc). The real fuzzers:
//
//   libFuzzer: CXX=clang++ cmake -S native -B build/fuzz -DCACHESTORE_FUZZ=ON
//              cmake --build build/fuzz --target libfuzzer_record
//              build/fuzz/libfuzzer_record -max_len=16384 tests/native/fuzz/corpus/record
//   AFL++:     CXX=afl-g++ cmake -S native -B build/afl -DCACHESTORE_SANITIZE=address
//              cmake --build build/afl --target fuzz_record
//              AFL_USE_ASAN=1 afl-fuzz -i tests/native/fuzz/corpus/record -o build/afl/found
//                  -- build/afl/fuzz_record @@
//
// New seeds: fuzz_record --write-corpus tests/native/fuzz/corpus/record
#ifndef CACHESTORE_TESTS_FUZZ_FUZZ_H_
#define CACHESTORE_TESTS_FUZZ_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

// The target. Ends the process if something that must hold doesn't.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace cachestore::fuzz {

using Bytes = std::vector<uint8_t>;

// What the corpus must have, by file name: made by the code of today, so that
// mutations start from something that is read.
std::map<std::string, Bytes> Seeds();

inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "doesn't hold: %s\n", what);
  std::abort();
}

}  // namespace cachestore::fuzz

#endif  // CACHESTORE_TESTS_FUZZ_FUZZ_H_
