// The C interface over Store. Turns Status and exceptions into codes; decides
// nothing else.
#include "cachestore/c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <string>

#include "base/checksum.h"
#include "base/env.h"
#include "base/status.h"
#include "store.h"

namespace {

using cachestore::BlockId;
using cachestore::Env;
using cachestore::Result;
using cachestore::Status;
using cachestore::Store;

thread_local std::string last_error;

int Report(const Status& status) {
  if (!status.ok()) last_error = status.text();
  return status.code();
}

int Null(const char* what) { return Report({CS_INVALID, std::string(what) + " is null"}); }

// Runs a call; no exception gets out.
template <typename Call>
int Guard(Call call) noexcept {
  try {
    return Report(call());
  } catch (const std::bad_alloc&) {
    try {
      last_error = "out of memory";
    } catch (...) {
    }
    return CS_NO_MEMORY;
  } catch (const std::exception& error) {
    try {
      last_error = error.what();
    } catch (...) {
    }
    return CS_INTERNAL;
  } catch (...) {
    return CS_INTERNAL;
  }
}

Store& StoreOf(cs_store* store) { return *reinterpret_cast<Store*>(store); }

// BlockId is 16 plain bytes, so an array of them is what the caller has.
static_assert(sizeof(BlockId) == 16 && alignof(BlockId) == 1);
std::span<const BlockId> BlocksOf(const uint8_t* ids, size_t n) {
  return {reinterpret_cast<const BlockId*>(ids), n};
}

Status CheckSize(const char* name, size_t given, size_t size) {
  if (given == size) return Status::Ok();
  return {CS_INVALID, "struct_size is " + std::to_string(given) + "; this library's " + name +
                          " has " + std::to_string(size) + " bytes"};
}

int StartTask(cs_store* store, const cs_batch* batch, cs_task* task,
              Result<cs_task> (Store::*start)(const cs_batch&)) {
  if (store == nullptr || batch == nullptr || task == nullptr) return Null("store, batch or task");
  *task = 0;
  return Guard([&] {
    Result<cs_task> started = (StoreOf(store).*start)(*batch);
    if (started.ok()) *task = started.value();
    return started.status();
  });
}

}  // namespace

extern "C" {

int cs_open(const cs_config* config, cs_store** out) {
  if (config == nullptr || out == nullptr) return Null("config or out");
  *out = nullptr;
  return Guard([&]() -> Status {
    Status size = CheckSize("cs_config", config->struct_size, sizeof(cs_config));
    if (!size.ok()) return size;
    Result<std::unique_ptr<Store>> opened = Store::Open(*config, Env::Real());
    if (opened.ok()) *out = reinterpret_cast<cs_store*>(opened.value().release());
    return opened.status();
  });
}

int cs_open_pool(cs_store* store, const cs_pool_config* config, uint32_t* pool) {
  if (store == nullptr || config == nullptr || pool == nullptr) {
    return Null("store, config or pool");
  }
  *pool = 0;
  return Guard([&]() -> Status {
    Status size = CheckSize("cs_pool_config", config->struct_size, sizeof(cs_pool_config));
    if (!size.ok()) return size;
    Result<uint32_t> opened = StoreOf(store).OpenPool(*config);
    if (opened.ok()) *pool = opened.value();
    return opened.status();
  });
}

int cs_lookup(cs_store* store, uint32_t pool, size_t n, const uint8_t* block_ids,
              uint8_t* present) {
  if (store == nullptr) return Null("store");
  if (n > 0 && (block_ids == nullptr || present == nullptr)) return Null("block_ids or present");
  return Guard([&] { return StoreOf(store).Lookup(pool, BlocksOf(block_ids, n), {present, n}); });
}

int cs_lookup_prefix(cs_store* store, uint32_t pool, size_t n, const uint8_t* block_ids,
                     size_t* length) {
  if (store == nullptr || length == nullptr) return Null("store or length");
  if (n > 0 && block_ids == nullptr) return Null("block_ids");
  *length = 0;
  return Guard([&] {
    Result<size_t> found = StoreOf(store).LookupPrefix(pool, BlocksOf(block_ids, n));
    if (found.ok()) *length = found.value();
    return found.status();
  });
}

int cs_load(cs_store* store, const cs_batch* batch, cs_task* task) {
  return StartTask(store, batch, task, &Store::Load);
}

int cs_dump(cs_store* store, const cs_batch* batch, cs_task* task) {
  return StartTask(store, batch, task, &Store::Dump);
}

int cs_wait(cs_store* store, cs_task task, uint32_t timeout_ms, int32_t* results, size_t n) {
  if (store == nullptr) return Null("store");
  if (n > 0 && results == nullptr) return Null("results");
  return Guard([&] {
    return StoreOf(store).Wait(task, std::chrono::milliseconds(timeout_ms), {results, n});
  });
}

int cs_clear(cs_store* store) {
  if (store == nullptr) return Null("store");
  return Guard([&] { return StoreOf(store).Clear(); });
}

int cs_get_stats(cs_store* store, cs_stats* out) {
  if (store == nullptr || out == nullptr) return Null("store or out");
  return Guard([&] {
    *out = StoreOf(store).Stats();
    return Status::Ok();
  });
}

int cs_next_event(cs_store* store, char* text, size_t capacity, int32_t* level) {
  if (store == nullptr || text == nullptr || capacity == 0 || level == nullptr) return 0;
  const auto event = StoreOf(store).NextEvent();
  if (!event.has_value()) return 0;
  const size_t length = std::min(event->text.size(), capacity - 1);
  std::memcpy(text, event->text.data(), length);
  text[length] = '\0';
  *level = event->level;
  return 1;
}

const char* cs_last_error(void) { return last_error.c_str(); }

uint32_t cs_crc32c(uint32_t seed, const void* data, size_t length) {
  return cachestore::Crc32c(seed, data, length);
}

void cs_shutdown(cs_store* store) {
  if (store == nullptr) return;
  Guard([&] {
    StoreOf(store).Shutdown();
    return Status::Ok();
  });
}

void cs_close(cs_store* store) {
  if (store == nullptr) return;
  Guard([&] {
    const std::unique_ptr<Store> owner(&StoreOf(store));
    owner->Close();
    return Status::Ok();
  });
}

}  // extern "C"
