// Runs a fuzz target without libFuzzer:
//
//   fuzz_record [--mutations N] [--seed S] FILE|DIRECTORY...   the files, then N mutations
//   fuzz_record --write-corpus DIRECTORY                       the seeds, as files
//   fuzz_record                                                one input, from standard input
//
// The same seed gives the same inputs. One on which the target aborts is left in
// the current directory as fuzz-crash (under ASan with ASAN_OPTIONS=abort_on_error=1).
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>

#include "fuzz/fuzz.h"

namespace cachestore::fuzz {
namespace {

const Bytes* current = nullptr;  // for the signal handler

void KeepInput(int) {
  const int fd = open("fuzz-crash", O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd >= 0 && current != nullptr) {
    [[maybe_unused]] const ssize_t written = write(fd, current->data(), current->size());
  }
  _exit(1);
}

void Run(const Bytes& input) {
  current = &input;
  // A copy of its own size, so that a read behind it is seen.
  const std::unique_ptr<uint8_t[]> copy(new uint8_t[input.size()]);
  std::copy(input.begin(), input.end(), copy.get());
  (void)LLVMFuzzerTestOneInput(copy.get(), input.size());
}

class Mutator {
 public:
  Mutator(std::vector<Bytes> bases, uint64_t seed) : bases_(std::move(bases)), engine_(seed) {}

  Bytes Next() {
    Bytes bytes = bases_[Below(bases_.size())];
    for (size_t n = 1 + Below(6); n > 0; --n) Change(bytes);
    return bytes;
  }

 private:
  size_t Below(size_t n) { return engine_() % n; }

  void Change(Bytes& bytes) {
    static constexpr uint64_t kNumbers[] = {0,          1,          0x7f,       0x80,   0xff,
                                            0x7fffffff, 0x80000000, 0xffffffff, 0x1000, UINT64_MAX};
    if (bytes.empty()) bytes.push_back(0);
    const size_t at = Below(bytes.size());
    const size_t left = bytes.size() - at;
    switch (Below(8)) {
      case 0:
        bytes[at] ^= static_cast<uint8_t>(1u << Below(8));
        break;
      case 1:
        bytes[at] = static_cast<uint8_t>(engine_());
        break;
      case 2: {  // a number at a place for one
        const uint64_t number = kNumbers[Below(std::size(kNumbers))];
        const size_t place = at / 4 * 4;
        std::memcpy(bytes.data() + place, &number,
                    std::min<size_t>(bytes.size() - place, Below(2) == 0 ? 4 : 8));
        break;
      }
      case 3:
        bytes.resize(at);
        break;
      case 4:
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), 1 + Below(64), 0);
        break;
      case 5:
        bytes.erase(
            bytes.begin() + static_cast<ptrdiff_t>(at),
            bytes.begin() + static_cast<ptrdiff_t>(at + 1 + Below(std::min<size_t>(left, 64))));
        break;
      case 6: {  // a piece to another place
        const size_t to = Below(bytes.size());
        const size_t n = std::min({left, bytes.size() - to, 1 + Below(512)});
        std::memmove(bytes.data() + to, bytes.data() + at, n);
        break;
      }
      default: {  // the end of another one
        const Bytes& other = bases_[Below(bases_.size())];
        if (other.size() > at) {
          bytes.resize(at);
          bytes.insert(bytes.end(), other.begin() + static_cast<ptrdiff_t>(at), other.end());
        }
      }
    }
  }

  const std::vector<Bytes> bases_;
  std::mt19937_64 engine_;
};

Bytes ReadAll(std::istream& in) {
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

int WriteCorpus(const std::string& directory) {
  std::filesystem::create_directories(directory);
  for (const auto& [name, bytes] : Seeds()) {
    std::ofstream file(directory + "/" + name, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    if (!file) return 1;
  }
  return 0;
}

// The corpus in a directory must have today's seeds.
bool HasSeeds(const std::filesystem::path& directory) {
  for (const auto& [name, bytes] : Seeds()) {
    std::ifstream file(directory / name, std::ios::binary);
    if (ReadAll(file) == bytes) continue;
    std::fprintf(stderr, "%s/%s isn't what --write-corpus writes\n", directory.c_str(),
                 name.c_str());
    return false;
  }
  return true;
}

int Main(const std::vector<std::string>& arguments) {
  uint64_t mutations = 0;
  uint64_t seed = 1;
  std::vector<Bytes> inputs;
  const auto read = [&](const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) std::fprintf(stderr, "can't read %s\n", path.c_str());
    inputs.push_back(ReadAll(file));
    return static_cast<bool>(file);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool has_value = i + 1 < arguments.size();
    if (arguments[i] == "--write-corpus" && has_value) return WriteCorpus(arguments[i + 1]);
    if (arguments[i] == "--mutations" && has_value) {
      mutations = std::stoull(arguments[++i]);
    } else if (arguments[i] == "--seed" && has_value) {
      seed = std::stoull(arguments[++i]);
    } else if (std::filesystem::is_directory(arguments[i])) {
      if (!HasSeeds(arguments[i])) return 1;
      std::vector<std::filesystem::path> paths;
      for (const auto& entry : std::filesystem::directory_iterator(arguments[i])) {
        paths.push_back(entry.path());
      }
      std::sort(paths.begin(), paths.end());
      if (!std::all_of(paths.begin(), paths.end(), read)) return 1;
    } else if (!read(arguments[i])) {
      return 1;
    }
  }
  if (arguments.empty()) {
    std::ifstream in("/dev/stdin", std::ios::binary);
    inputs.push_back(ReadAll(in));
  }
  signal(SIGABRT, KeepInput);
  for (const Bytes& input : inputs) Run(input);
  if (mutations > 0) {
    std::printf("%zu inputs, %llu mutations, seed %llu\n", inputs.size(),
                static_cast<unsigned long long>(mutations), static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    Mutator mutator(std::move(inputs), seed);
    for (uint64_t i = 0; i < mutations; ++i) Run(mutator.Next());
  }
  return 0;
}

}  // namespace
}  // namespace cachestore::fuzz

int main(int argc, char** argv) { return cachestore::fuzz::Main({argv + 1, argv + argc}); }
