#include "posix/collector_state.h"

#include <charconv>
#include <cstring>

#include "base/checksum.h"

namespace cachestore {
namespace {

constexpr std::string_view kTitle = "cachestore-collector 1\n";
constexpr char kChangesMagic[8] = {'C', 'S', 'S', 'P', 'A', 'C', 'E', '2'};

// The next line must be `name` and a number.
template <typename Number>
bool Take(std::string_view& text, std::string_view name, Number& number) {
  if (!text.starts_with(name)) return false;
  text.remove_prefix(name.size());
  if (!text.starts_with(' ')) return false;
  text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  if (!text.starts_with('\n')) return false;
  text.remove_prefix(1);
  return true;
}

}  // namespace

std::string CollectorState::Format() const {
  std::string text(kTitle);
  const auto line = [&](const char* name, uint64_t number) {
    text.append(name).append(" ").append(std::to_string(number)).append("\n");
  };
  line("capacity", limits.capacity);
  line("free_space_reserve", limits.free_space_reserve);
  line("high_watermark_percent", limits.high_watermark_percent);
  line("low_watermark_percent", limits.low_watermark_percent);
  line("used", used);
  line("files", files);
  line("generation", generation);
  for (const auto& [instance, bytes] : grants) {
    if (text.size() + instance.size() + 40 > kMaxSize) break;
    line(("grant " + instance).c_str(), bytes);
  }
  return text;
}

std::optional<CollectorState> CollectorState::Parse(std::string_view text) {
  CollectorState state;
  if (text.size() > kMaxSize || !text.starts_with(kTitle)) return std::nullopt;
  text.remove_prefix(kTitle.size());
  const bool whole = Take(text, "capacity", state.limits.capacity) &&
                     Take(text, "free_space_reserve", state.limits.free_space_reserve) &&
                     Take(text, "high_watermark_percent", state.limits.high_watermark_percent) &&
                     Take(text, "low_watermark_percent", state.limits.low_watermark_percent) &&
                     Take(text, "used", state.used) && Take(text, "files", state.files) &&
                     Take(text, "generation", state.generation);
  if (!whole) return std::nullopt;
  while (!text.empty()) {
    constexpr std::string_view kGrant = "grant ";
    if (!text.starts_with(kGrant)) return std::nullopt;
    text.remove_prefix(kGrant.size());
    const std::string instance(text.substr(0, text.find(' ')));
    if (!Take(text, instance, state.grants[instance])) return std::nullopt;
  }
  return state;
}

void EncodeSpaceChanges(const SpaceChanges& changes, std::span<uint8_t, kSpaceChangesSize> bytes) {
  std::memset(bytes.data(), 0, bytes.size());
  std::memcpy(bytes.data(), kChangesMagic, 8);
  for (size_t i = 0; i < 8; ++i) {
    bytes[8 + i] = static_cast<uint8_t>(changes.added >> (8 * i));
    bytes[16 + i] = static_cast<uint8_t>(changes.removed >> (8 * i));
    bytes[24 + i] = static_cast<uint8_t>(changes.lacked >> (8 * i));
  }
  const uint32_t crc = Crc32c(0, bytes.data(), 32);
  for (size_t i = 0; i < 4; ++i) bytes[32 + i] = static_cast<uint8_t>(crc >> (8 * i));
}

std::optional<SpaceChanges> DecodeSpaceChanges(std::string_view bytes) {
  if (bytes.size() < kSpaceChangesSize || std::memcmp(bytes.data(), kChangesMagic, 8) != 0) {
    return std::nullopt;
  }
  const auto number = [&](size_t at, size_t n) {
    uint64_t value = 0;
    for (size_t i = 0; i < n; ++i)
      value |= uint64_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
    return value;
  };
  if (number(32, 4) != Crc32c(0, bytes.data(), 32)) return std::nullopt;
  return SpaceChanges{number(8, 8), number(16, 8), number(24, 8)};
}

}  // namespace cachestore
