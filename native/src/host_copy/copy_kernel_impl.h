// What the files of the copy kernels share.
#ifndef CACHESTORE_HOST_COPY_COPY_KERNEL_IMPL_H_
#define CACHESTORE_HOST_COPY_COPY_KERNEL_IMPL_H_

#include <optional>

#include "host_copy/copy_kernel.h"

namespace cachestore::copy_kernel {

// Streaming stores are worth it only if they fill whole lines.
inline constexpr size_t kLine = 64;

// Null where the CPU or the operating system lacks what it needs, or it was
// compiled for another architecture.
std::optional<CopyVariant> Avx512Fused();
std::optional<CopyVariant> Avx512();
std::optional<CopyVariant> Avx2();
std::optional<CopyVariant> Sse2();

// Orders the calling thread's streaming stores before its later stores.
void Fence();

}  // namespace cachestore::copy_kernel

#endif  // CACHESTORE_HOST_COPY_COPY_KERNEL_IMPL_H_
