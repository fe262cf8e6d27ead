#include "posix/direct_io.h"

#include <cstring>

#include "base/aligned_buffer.h"

namespace cachestore {
namespace {

Status WriteThrough(Env& env, const std::string& path, uint8_t* data) {
  const Result<Fd> opened = env.OpenWrite(path, /*direct=*/true);
  if (!opened.ok()) return opened.status();
  FileCloser file(env, opened.value());
  iovec part{data, kAlignment};
  const Status written = env.WriteFull(file.get(), {&part, 1}, 0);
  return written.ok() ? file.Close() : written;
}

Status ReadThrough(Env& env, const std::string& path, uint8_t* data) {
  const Result<Fd> opened = env.OpenRead(path, /*direct=*/true);
  if (!opened.ok()) return opened.status();
  const FileCloser file(env, opened.value());
  iovec part{data, kAlignment};
  return env.ReadFull(file.get(), {&part, 1}, 0).status();
}

}  // namespace

Status TryDirect(Env& env, const std::string& path) {
  AlignedBuffer buffer;
  uint8_t* const data = buffer.Get(kAlignment);
  if (data == nullptr) return {CS_NO_MEMORY, "no memory to try O_DIRECT"};
  std::memset(data, 0, kAlignment);
  Status tried = WriteThrough(env, path, data);
  if (tried.ok()) tried = ReadThrough(env, path, data);
  (void)env.Unlink(path);
  return tried;
}

}  // namespace cachestore
