#include "posix/block_path.h"

namespace cachestore {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

int ValueOf(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string HexOf(const BlockId& block) {
  std::string text;
  text.reserve(2 * block.size());
  for (const uint8_t byte : block) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::optional<BlockId> BlockOfHex(std::string_view name) {
  BlockId block;
  if (name.size() != 2 * block.size()) return std::nullopt;
  for (size_t i = 0; i < block.size(); ++i) {
    const int high = ValueOf(name[2 * i]);
    const int low = ValueOf(name[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    block[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return block;
}

uint16_t FanOutOf(const BlockId& block) {
  return static_cast<uint16_t>(block[0] << 4 | block[1] >> 4);
}

std::string FanOutName(uint16_t number) {
  return {kDigits[number >> 8 & 15], kDigits[number >> 4 & 15], kDigits[number & 15]};
}

std::optional<uint16_t> FanOutOfName(std::string_view name) {
  if (name.size() != 3) return std::nullopt;
  int number = 0;
  for (const char c : name) {
    if (ValueOf(c) < 0) return std::nullopt;
    number = number << 4 | ValueOf(c);
  }
  return static_cast<uint16_t>(number);
}

}  // namespace cachestore
