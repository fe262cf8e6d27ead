// Builds the tiers that a pipeline spec ("Posix") names.
#ifndef CACHESTORE_PIPELINE_PIPELINE_H_
#define CACHESTORE_PIPELINE_PIPELINE_H_

#include <memory>

#include "base/env.h"
#include "base/event_ring.h"
#include "base/status.h"
#include "cachestore/c_api.h"
#include "tier/tier.h"

namespace cachestore {

// The pool in the config, checked: CS_INVALID names the field that is wrong.
Result<PoolOptions> PoolOf(const cs_config& config);
Result<PoolOptions> PoolOf(const cs_pool_config& config);

// Checks the rest of the config and opens the topmost tier.
Result<std::unique_ptr<Tier>> OpenPipeline(const cs_config& config, Env& env,
                                           std::shared_ptr<EventRing> events);

}  // namespace cachestore

#endif  // CACHESTORE_PIPELINE_PIPELINE_H_
