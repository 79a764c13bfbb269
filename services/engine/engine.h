// The engine's headers that services and tools use, in one include.
#pragma once

#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/kv_memory.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/prefix_index.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/cache/spare_pages.h"
#include "services/engine/model/model.h"
#include "services/engine/model/safetensors.h"
#include "services/engine/runtime/decode_engine.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/runtime/logit_agreement.h"
#include "services/engine/runtime/prefill_engine.h"
#include "services/engine/selection/kept_tokens_selector.h"
