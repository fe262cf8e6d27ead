// Fuzz target: the two small files that stores tell each other of space by: the
// collector's state, and what a store's lock file says that it has added.
#include <algorithm>
#include <span>
#include <string_view>

#include "fuzz/fuzz.h"
#include "posix/collector_state.h"

namespace cachestore::fuzz {

std::map<std::string, Bytes> Seeds() {
  CollectorState state;
  state.limits = {uint64_t{1} << 40, 1 << 20, 97, 95};
  state.used = 123456789;
  state.files = 42;
  state.generation = 7;
  state.grants = {{"0123456789abcdef", 1 << 30}, {"fedcba9876543210", 0}};
  const std::string text = state.Format();
  const std::string none = CollectorState{}.Format();
  Bytes changes(kSpaceChangesSize);
  EncodeSpaceChanges({1 << 30, 4096, 8192}, std::span<uint8_t, kSpaceChangesSize>(changes));
  return {{"state", {text.begin(), text.end()}},
          {"no-limits", {none.begin(), none.end()}},
          {"cut-short", {text.begin(), text.end() - 3}},
          {"space-changes", changes}};
}

}  // namespace cachestore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachestore;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto state = CollectorState::Parse(text);
  if (state.has_value()) {
    const auto again = CollectorState::Parse(state->Format());
    fuzz::Require(again.has_value() && again->Format() == state->Format(),
                  "what is read is written so that it is read again");
    fuzz::Require(size <= CollectorState::kMaxSize, "no longer than it may be");
  }
  const auto changes = DecodeSpaceChanges(text);
  if (changes.has_value()) {
    fuzz::Bytes bytes(kSpaceChangesSize);
    EncodeSpaceChanges(*changes, std::span<uint8_t, kSpaceChangesSize>(bytes));
    fuzz::Require(std::equal(bytes.begin(), bytes.begin() + 36, data), "nothing else is read so");
  }
  return 0;
}
