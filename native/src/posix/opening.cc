#include "posix/opening.h"

#include <atomic>
#include <string>
#include <utility>

#include "base/worker_pool.h"
#include "tier/request.h"

namespace cachestore {
namespace {

// How long a thread that has nothing left to do is waited for.
constexpr std::chrono::milliseconds kJoinPatience{2000};

// Two names of one directory: every block would be looked for in one and lie in
// the other, and be counted twice.
Status CheckDistinct(const Directories& directories, const std::vector<FileInfo>& places) {
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      if (places[i].inode == 0 || places[k].inode != places[i].inode ||
          places[k].device != places[i].device) {
        continue;
      }
      return {CS_INVALID, "storage_backends: " + directories[k]->root() + " and " +
                              directories[i]->root() + " are the same directory"};
    }
  }
  return Status::Ok();
}

}  // namespace

bool RunWithin(std::chrono::milliseconds patience, const char* name, std::function<void()> work) {
  Batch batch;
  batch.blocks.resize(1);
  const auto request = std::make_shared<Request>(std::move(batch));
  WorkerPool pool(name, 1, [work = std::move(work)](WorkerPool::Job& job, WorkerPool::Scratch&) {
    (void)Thrown(work);
    static_cast<Request*>(job.owner.get())->Finish(0, CS_OK);
    return false;
  });
  if (!pool.Submit({{request, 0}})) return false;
  const bool done = request->WaitUntil(Request::Clock::now() + patience);
  (void)pool.Close();
  (void)pool.Join(done ? kJoinPatience : std::chrono::milliseconds(0));
  return done;
}

Roots MakeRoots(Env& env, EventRing& events, const PosixOptions& options) {
  Roots roots;
  for (size_t i = 0; i < options.roots.size(); ++i) {
    const SpaceLimits limits{i < options.capacities.size() ? options.capacities[i] : 0,
                             options.free_space_reserve, options.high_watermark_percent,
                             options.low_watermark_percent};
    roots.push_back(std::make_shared<Root>(env, events, options.roots[i], limits,
                                           options.direct != CS_DIRECT_OFF));
  }
  return roots;
}

Result<Directories> OpenDirectories(Env& env, const std::shared_ptr<EventRing>& events,
                                    const PosixOptions& options, const PoolOptions& pool,
                                    const Roots& roots) {
  struct Opening {
    std::shared_ptr<EventRing> events;
    Directories directories;
    // Each its own thread's, until its shard has ended.
    std::vector<Status> statuses;
    std::vector<FileInfo> places;
    std::atomic<bool> given_up{false};
  };
  const auto opening = std::make_shared<Opening>();
  opening->events = events;
  for (const std::shared_ptr<Root>& root : roots) {
    opening->directories.push_back(std::make_shared<Directory>(
        env, *events,
        DirectoryOptions{root->path, pool.identity_name, pool.manifest, options.direct,
                         options.zero_copy, root->space.limits()},
        root));
  }
  const size_t count = opening->directories.size();
  opening->statuses.assign(count, Status(CS_NO_MEMORY, "no memory to open a directory"));
  opening->places.resize(count);
  Batch batch;
  batch.blocks.resize(count);
  const auto request = std::make_shared<Request>(std::move(batch));
  WorkerPool openers("cs-open", count, [opening](WorkerPool::Job& job, WorkerPool::Scratch&) {
    Request& each = *static_cast<Request*>(job.owner.get());
    Directory& directory = *opening->directories[job.index];
    if (!each.Begin(job.index, /*touches=*/false)) return false;
    const Code thrown = Thrown([&] {
      opening->statuses[job.index] = directory.Open();
      const Result<FileInfo> place = directory.Place();
      if (place.ok()) opening->places[job.index] = place.value();
    });
    if (!each.Finish(job.index, thrown) && opening->given_up.load()) directory.Close();
    return false;
  });
  std::vector<WorkerPool::Job> jobs;
  for (uint32_t i = 0; i < count; ++i) jobs.push_back({request, i});
  if (!openers.Submit(std::move(jobs)))
    return Status(CS_NO_MEMORY, "no threads to open directories");
  const bool all = request->WaitUntil(Request::Clock::now() + options.timeout);
  if (!all) {
    (void)request->Cancel(CS_TIMEOUT);
    request->Wait();  // nothing here touches the caller's memory: it has ended
  }
  (void)openers.Close();
  (void)openers.Join(all ? kJoinPatience : std::chrono::milliseconds(0));

  Status failed;
  size_t usable = 0;
  for (size_t i = 0; i < count; ++i) {
    Directory& directory = *opening->directories[i];
    Status status;
    if (request->results()[i] == CS_TIMEOUT) {
      status = {CS_TIMEOUT, "opening " + directory.root() +
                                ": the filesystem didn't answer within " +
                                std::to_string(options.timeout.count()) + " ms"};
    } else {
      status = opening->statuses[i];
    }
    // A setting that can't be had is no trouble that passes.
    const bool refused = status.code() == CS_INVALID;
    const bool reads = count > 1 && directory.health().use() == Health::Use::kReadOnly;
    if (status.ok() || (reads && !refused)) {
      ++usable;
      continue;
    }
    if (refused) usable = 0;
    failed = failed.ok() ? status : Status(failed.code(), failed.text() + "; " + status.text());
    if (refused) break;
    if (count > 1) directory.health().StartAs(Health::Use::kOut, status);
  }
  // What is still being opened may yet be written by its thread.
  std::vector<FileInfo> places(count);
  for (size_t i = 0; i < count; ++i) {
    if (request->results()[i] == CS_OK) places[i] = opening->places[i];
  }
  if (usable > 0) failed = CheckDistinct(opening->directories, places);
  if (usable > 0 && failed.ok()) return opening->directories;
  opening->given_up.store(true);
  (void)RunWithin(all ? kJoinPatience : std::chrono::milliseconds(0), "cs-close",
                  [opening, request] {
                    for (size_t i = 0; i < opening->directories.size(); ++i) {
                      if (request->results()[i] != CS_TIMEOUT) opening->directories[i]->Close();
                    }
                  });
  return failed;
}

}  // namespace cachestore
