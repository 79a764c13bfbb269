#include "services/worker_flags/kv_pool.h"

#include <algorithm>

#include "services/base/byte_size.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/engine/execution/workspace_bytes.h"

namespace spl {
namespace {

constexpr double kMarginShare = 0.06;
constexpr uint64_t kMarginMin = 1ull << 30;
constexpr uint64_t kHostShare = 4;        // a quarter of what is available
constexpr uint64_t kHostShareAtMost = 2;  // a half, where a pool would not hold one sequence otherwise
constexpr int32_t kHostSequences = 8;     // more long sequences than a CPU runs at once
constexpr int64_t kTokensAtLeast = 256;   // wire::PagesOfPool refuses less

// Bytes on each device.
uint64_t PerRank(const KvPoolNeed& pool, uint64_t bytes) { return bytes / static_cast<uint64_t>(pool.num_ranks); }

// Bytes that a pool of `bytes` takes from the room: host memory is one for all ranks, a GPU each rank's own.
uint64_t Taken(const KvRoom& room, const KvPoolNeed& pool, uint64_t bytes) {
  return room.on_host ? bytes : PerRank(pool, bytes);
}

uint64_t MostUseful(const KvRoom& room, const KvPoolNeed& pool) {
  const int32_t sequences = room.on_host ? std::min(pool.max_sequences, kHostSequences) : pool.max_sequences;
  return Taken(room, pool, pool.sequence_bytes * static_cast<uint64_t>(std::max(sequences, 1)));
}

// Equal shares of `budget` for the wanted sizes; the others get the rest of a pool that wants less. [wanted.size()]
std::vector<uint64_t> EqualShares(uint64_t budget, const std::vector<uint64_t>& wanted) {
  std::vector<size_t> order(wanted.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  std::vector<uint64_t> shares(wanted.size());
  for (size_t i = 0; i < order.size(); ++i) {
    shares[order[i]] = std::min(wanted[order[i]], budget / (order.size() - i));
    budget -= shares[order[i]];
  }
  return shares;
}

absl::Status TooLittle(const KvRoom& room, const KvPoolNeed& pool, uint64_t taken) {
  if (room.on_host)
    return Errorf(
        absl::StatusCode::kResourceExhausted,
        "--kv-bytes auto: {} of memory are available, too little for the {} pool; close other programs, raise "
        "the limit of the container, or give --kv-bytes a size",
        FormatByteSize(room.free_bytes), pool.name);
  return Errorf(
      absl::StatusCode::kResourceExhausted,
      "--kv-bytes auto: behind the weights {} of the GPU's {} are free; a margin of {} and {} for workspace and "
      "pools of fixed size leave too little for the {} pool. Close other processes on the GPU, lower "
      "--slice-tokens or --max-sequences, split the model (--tp), or give --kv-bytes a size",
      FormatByteSize(room.free_bytes), FormatByteSize(room.total_bytes), FormatByteSize(KvMargin(room.total_bytes)),
      FormatByteSize(taken), pool.name);
}

}  // namespace

uint64_t KvMargin(uint64_t total_bytes) {
  return std::max(static_cast<uint64_t>(kMarginShare * static_cast<double>(total_bytes)), kMarginMin);
}

int64_t TokensOfPool(const KvPoolNeed& pool, uint64_t bytes) {
  if (pool.sequence_bytes == 0) return 0;
  return static_cast<int64_t>(static_cast<double>(bytes) / static_cast<double>(pool.sequence_bytes) *
                              static_cast<double>(pool.max_context));
}

absl::StatusOr<std::vector<KvPoolSize>> DivideKvRoom(const KvRoom& room, std::span<const KvPoolNeed> pools) {
  uint64_t fixed = 0;  // on each device, or on the host
  std::vector<const KvPoolNeed*> open;
  for (const KvPoolNeed& pool : pools) {
    if (!room.on_host) fixed += pool.other_bytes;
    if (pool.bytes.has_value())
      fixed += Taken(room, pool, *pool.bytes);
    else
      open.push_back(&pool);
  }
  const uint64_t reserved = fixed + (room.on_host ? 0 : KvMargin(room.total_bytes));
  const uint64_t left = room.free_bytes - std::min(room.free_bytes, reserved);
  std::vector<uint64_t> wanted;
  for (const KvPoolNeed* pool : open) wanted.push_back(MostUseful(room, *pool));
  std::vector<uint64_t> shares = EqualShares(room.on_host ? left / kHostShare : left, wanted);
  bool raised = false;
  if (room.on_host) {
    for (size_t i = 0; i < open.size(); ++i) {
      const uint64_t least = std::min(open[i]->sequence_bytes, left / kHostShareAtMost / open.size());
      raised |= shares[i] < least;
      shares[i] = std::max(shares[i], least);
    }
  }
  const std::string why =
      room.on_host ? fmt::format("{} of {} available memory, {} pool{}", raised ? "up to a half" : "a quarter",
                                 FormatByteSize(left), open.size(), open.size() == 1 ? "" : "s")
                   : fmt::format(
                         "{} of {} free behind the weights, less a margin of {} and {} of workspace and other "
                         "pools; {} pool{}",
                         FormatByteSize(room.free_bytes), FormatByteSize(room.total_bytes),
                         FormatByteSize(KvMargin(room.total_bytes)), FormatByteSize(fixed), open.size(),
                         open.size() == 1 ? "" : "s");
  std::vector<KvPoolSize> sizes;
  size_t next = 0;
  for (const KvPoolNeed& pool : pools) {
    if (pool.bytes.has_value()) {
      sizes.push_back({*pool.bytes, "as given"});
      continue;
    }
    const bool enough = shares[next] == wanted[next];
    const uint64_t bytes = room.on_host ? shares[next] : shares[next] * static_cast<uint64_t>(pool.num_ranks);
    if (TokensOfPool(pool, bytes) < std::min(kTokensAtLeast, pool.max_context)) return TooLittle(room, pool, fixed);
    sizes.push_back({bytes, enough ? "as much as its sequences need; " + why : why});
    ++next;
  }
  return sizes;
}

KvPoolNeed NeedOfPool(const std::string& name, std::optional<uint64_t> bytes, const engine::Model& model,
                      const engine::ExecutorOptions& options) {
  const int64_t max_context = model.config().max_positions;
  return {
      .name = name,
      .bytes = bytes,
      .max_context = max_context,
      .sequence_bytes = static_cast<uint64_t>(engine::PagesForTokens(model.config(), max_context)) * model.page_bytes(),
      .max_sequences = options.max_sequences,
      .num_ranks = model.num_ranks(),
      .other_bytes = engine::WorkspaceBytes(model, options)};
}

absl::StatusOr<std::vector<uint64_t>> SizeKvPools(const engine::Model& model, std::span<const KvPoolNeed> pools) {
  KvRoom room{.on_host = model.backend().host_memory(), .free_bytes = UINT64_MAX, .total_bytes = 0};
  if (std::any_of(pools.begin(), pools.end(), [](const KvPoolNeed& pool) { return !pool.bytes.has_value(); })) {
    for (int r = 0; r < model.num_ranks(); ++r) {
      SPLICE_ASSIGN_OR_RETURN(const kernels::DeviceMemory memory, model.rank(r).backend().Memory());
      if (memory.free_bytes >= room.free_bytes) continue;
      room.free_bytes = memory.free_bytes;
      room.total_bytes = memory.total_bytes;
    }
  }
  SPLICE_ASSIGN_OR_RETURN(const std::vector<KvPoolSize> sizes, DivideKvRoom(room, pools));
  std::vector<uint64_t> bytes;
  for (size_t i = 0; i < pools.size(); ++i) {
    const int64_t tokens = TokensOfPool(pools[i], sizes[i].bytes);
    log::Info("kv_pool.sized", log::F("pool", pools[i].name), log::F("bytes", sizes[i].bytes),
              log::F("size", FormatByteSize(sizes[i].bytes)), log::F("tokens", tokens), log::F("why", sizes[i].why));
    if (tokens < pools[i].max_context)
      log::Warning("kv_pool.small", log::F("pool", pools[i].name), log::F("tokens", tokens),
                   log::F("max_context", pools[i].max_context),
                   log::F("effect", "longer sequences are refused; a larger --kv-bytes or more memory serves them"));
    bytes.push_back(sizes[i].bytes);
  }
  return bytes;
}

}  // namespace spl
