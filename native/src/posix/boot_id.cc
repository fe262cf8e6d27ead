#include "posix/boot_id.h"

#include <string_view>

namespace cachestore {
namespace {

// A number's text, as in 4d8b0ff7-1c3e-4a53-9d8e-0a6b7c1f2e35.
constexpr size_t kTextSize = 36;

int DigitOf(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

BootId Parsed(std::string_view text) {
  BootId id{};
  size_t digits = 0;
  for (const char c : text) {
    if (c == '-') continue;
    const int digit = DigitOf(c);
    if (digit < 0 || digits == 2 * id.size()) return {};
    id[digits / 2] = static_cast<uint8_t>(id[digits / 2] << 4 | digit);
    ++digits;
  }
  return digits == 2 * id.size() ? id : BootId{};
}

}  // namespace

BootId ReadBootId(Env& env) {
  const Result<Fd> opened = env.OpenRead("/proc/sys/kernel/random/boot_id", /*direct=*/false);
  if (!opened.ok()) return {};
  const FileCloser file(env, opened.value());
  char text[kTextSize];
  iovec part{text, sizeof text};
  const Result<uint64_t> read = env.ReadFull(file.get(), {&part, 1}, 0);
  if (!read.ok() || read.value() != sizeof text) return {};
  return Parsed({text, sizeof text});
}

}  // namespace cachestore
