// What fetching stored chunks into KV pages reaches, beside the transport alone, measured in turns so that they share
// the machine's moods. The ratios are medians of each round's own.
//
//   splice_page_fetch_bench [--bytes 1GiB] [--rounds 5] [--carrier shm|tcp] [--store HOST:PORT]
//
// Raw is one-sided gets between two registered regions: in pieces of a chunk, and in the pieces that the pages of a
// prompt make (a chunk's pages lie apart there; those of a fetched segment are one piece). Pages are those of
// splice-tiny, 16 KiB, chunks 768 KiB: small ones, and so the harder case. Without --store the store is in this
// process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "services/base/byte_size.h"
#include "services/base/check.h"
#include "services/base/log.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/cache/segment_io.h"
#include "services/kvstore/kvstore_server.h"
#include "tests/support/paths.h"

namespace {

using namespace spl;
using Clock = std::chrono::steady_clock;

struct Setup {
  uint64_t bytes = 1ull << 30;
  int rounds = 5;
  std::string carrier = "shm";
  std::string store;
};

Clock::time_point Deadline() { return Clock::now() + std::chrono::minutes(5); }

template <typename Work>
double GigabytesPerSecond(uint64_t bytes, const Work& work) {
  const Clock::time_point start = Clock::now();
  work();
  const std::chrono::duration<double> taken = Clock::now() - start;
  return static_cast<double>(bytes) / taken.count() / 1e9;
}

std::unique_ptr<transport::KvTransport> MakeTransport(const std::string& carrier) {
  transport::TransportOptions options;
  options.carriers = carrier;
  return std::move(transport::KvTransport::Create(options)).value();
}

// Registered memory of a peer, read without leases or checksums.
class RawPeer {
 public:
  RawPeer(uint64_t bytes, const std::string& carrier, transport::KvTransport& client) : peer_(MakeTransport(carrier)) {
    memory_ = std::move(peer_->Allocate(bytes)).value();
    std::fill(memory_->data(), memory_->data() + bytes, std::byte{1});
    const transport::RemoteMemory remote{peer_->listen_address(), memory_->packed_rkey(),
                                         reinterpret_cast<uint64_t>(memory_->data()), memory_->size(),
                                         transport::HostId()};
    channel_ = std::move(client.Connect(remote, std::chrono::seconds(10))).value();
  }
  ~RawPeer() {
    (void)channel_->Close(std::chrono::seconds(10));
    memory_.reset();
    peer_->Stop();
  }
  // One get for each chunk, all posted at once.
  void Get(const std::vector<chunk::Pieces>& chunks) {
    std::vector<transport::GetOp> ops;
    uint64_t at = 0;
    for (const chunk::Pieces& pieces : chunks) {
      for (const auto piece : pieces) {
        ops.push_back({piece.data(), at, piece.size()});
        at += piece.size();
      }
    }
    std::promise<absl::Status> done;
    SPLICE_CHECK(channel_->Get(std::move(ops), [&](absl::Status s) { done.set_value(std::move(s)); }).ok(), "get");
    SPLICE_CHECK(done.get_future().get().ok(), "transfer");
  }

 private:
  std::unique_ptr<transport::KvTransport> peer_;
  std::unique_ptr<transport::RegisteredMemory> memory_;
  std::unique_ptr<transport::KvChannel> channel_;
};

// The pool, a prompt that fills it, and its chunks in the store, once as a prompt and once as a segment.
class Bench {
 public:
  explicit Bench(const Setup& setup)
      : setup_(setup),
        model_(std::move(engine::Model::Load(test::kTinyModel, kernels::MakeCpuBackend())).value()),
        payload_bytes_(engine::ChunkPayloadBytes(*model_)),
        num_chunks_(static_cast<int32_t>(setup.bytes / payload_bytes_)),
        client_(MakeTransport(setup.carrier)) {
    const auto pages = static_cast<int32_t>(num_chunks_ * payload_bytes_ / model_->page_bytes());
    memory_ = std::move(client_->Allocate(num_chunks_ * payload_bytes_)).value();
    pool_ = std::make_unique<engine::PagePool>(
        kernels::KvPoolView{memory_->data(), model_->kv_dtype(), model_->config().head_dim, pages}, &model_->backend());
    shape_ = {model_->config().num_layers, model_->config().num_kv_heads};
    tokens_.resize(static_cast<size_t>(num_chunks_) * 64);
    std::mt19937 random(3);
    for (int32_t& token : tokens_) token = static_cast<int32_t>(random() % 4000);
    prefix_keys_ = chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, tokens_);
    segment_keys_ = engine::SegmentIndex(model_->kv_fingerprint()).KeysOf({}, tokens_);
    if (setup.store.empty()) {
      kvstore::KvStoreOptions options;
      options.kv_transport = setup.carrier;
      options.memory_bytes = setup.bytes * 5 / 2;
      server_ = std::move(kvstore::KvStoreServer::Start(options)).value();
    }
    chunk::RemoteStoreOptions remote;
    remote.transport = client_.get();
    store_ = std::move(chunk::ClusterChunkStore::Connect(setup.store.empty() ? server_->grpc_address() : setup.store,
                                                         remote, {}))
                 .value();
    Fill();
  }
  ~Bench() {
    store_.reset();
    pool_.reset();
    memory_.reset();
    server_.reset();
    client_->Stop();
  }

  void Run() {
    const uint64_t moved = num_chunks_ * payload_bytes_;
    std::map<std::string, std::vector<double>> rates;
    RawPeer raw(moved, setup_.carrier, *client_);
    const auto apart = PromptPieces();
    std::vector<chunk::Pieces> whole;
    for (int32_t i = 0; i < num_chunks_; ++i)
      whole.push_back({{memory_->data() + static_cast<size_t>(i) * payload_bytes_, payload_bytes_}});
    for (int round = -2; round < setup_.rounds; ++round) {  // two to warm up
      std::map<std::string, double> now;
      now["raw get, chunks"] = GigabytesPerSecond(moved, [&] { raw.Get(whole); });
      now["segment into pages"] = GigabytesPerSecond(moved, [&] { FetchSegment(); });
      now["raw get, pages"] = GigabytesPerSecond(moved, [&] { raw.Get(apart); });
      now["prefix into pages"] = GigabytesPerSecond(moved, [&] { FetchPrefix(); });
      now["by way of a copy"] = GigabytesPerSecond(moved, [&] { FetchByCopy(); });
      if (round < 0) continue;
      for (const auto& [name, rate] : now) rates[name].push_back(rate);
      rates["segment / raw get, chunks"].push_back(now["segment into pages"] / now["raw get, chunks"]);
      rates["prefix / raw get, chunks"].push_back(now["prefix into pages"] / now["raw get, chunks"]);
      rates["prefix / raw get, pages"].push_back(now["prefix into pages"] / now["raw get, pages"]);
    }
    std::printf("carrier %s, %d chunks of %llu bytes, %d rounds\n", setup_.carrier.c_str(), num_chunks_,
                static_cast<unsigned long long>(payload_bytes_), setup_.rounds);
    for (auto& [name, values] : rates) {
      std::sort(values.begin(), values.end());
      const bool is_ratio = name.find('/') != std::string::npos;
      std::printf("  %-26s %6.2f %s   (%.2f to %.2f)\n", name.c_str(), values[values.size() / 2],
                  is_ratio ? "    " : "GB/s", values.front(), values.back());
    }
  }

 private:
  std::unique_ptr<engine::SequenceKv> AllPages() {
    auto kv = std::make_unique<engine::SequenceKv>(*pool_, shape_);
    SPLICE_CHECK(kv->Reserve(int64_t{num_chunks_} * 64).ok(), "all pages are free");
    return kv;
  }

  void Fill() {
    const auto kv = AllPages();
    std::mt19937_64 random(4);
    auto* const words = reinterpret_cast<uint64_t*>(memory_->data());
    for (size_t i = 0; i < num_chunks_ * payload_bytes_ / 8; ++i) words[i] = random();
    kv->set_num_tokens(int64_t{num_chunks_} * 64);
    for (int32_t i = 0; i < num_chunks_; ++i) {
      checksums_.push_back(ChecksumOf(*kv, i));
      for (const auto& keys : {prefix_keys_, segment_keys_}) {
        auto chunk = engine::PackChunk(*kv, i, keys[static_cast<size_t>(i)], *model_);
        SPLICE_CHECK(chunk.ok() && store_->Put({&*chunk, 1}, Deadline()).ok(), "put");
      }
    }
  }

  std::vector<uint32_t> ChecksumOf(const engine::SequenceKv& kv, int32_t chunk) const {
    const auto pages = kv.PagesOfChunk(chunk);
    std::vector<uint32_t> sums(pages.size());
    SPLICE_CHECK(pool_->ChecksumPages(pages, sums.data()).ok(), "checksums");
    return sums;
  }

  std::vector<chunk::Pieces> PromptPieces() {
    const auto kv = AllPages();
    engine::ChunkLanding landing(*pool_, payload_bytes_);
    std::vector<chunk::Pieces> pieces;
    for (int32_t i = 0; i < num_chunks_; ++i)
      pieces.push_back(landing.PiecesFor(static_cast<size_t>(i), kv->PagesOfChunk(i)));
    return pieces;
  }

  void FetchPrefix() {
    const auto kv = AllPages();
    const auto fetched = engine::FetchPrefix(*store_, prefix_keys_, 0, *model_, *kv, Deadline(), [] { return false; });
    SPLICE_CHECK(fetched.num_chunks == num_chunks_, "every chunk is fetched");
    for (int32_t i = 0; i < num_chunks_; i += 97)
      SPLICE_CHECK(ChecksumOf(*kv, i) == checksums_[static_cast<size_t>(i)], "the bytes that were put");
  }

  void FetchSegment() {
    const auto fetched = engine::FetchSegment(*store_, segment_keys_, tokens_, *model_, *pool_, Deadline(),
                                              [](int64_t) { return true; });
    SPLICE_CHECK(fetched.source != nullptr && fetched.source->tokens().size() == tokens_.size(), "all is fetched");
  }

  // As it was done before: into memory of its own, then copied.
  void FetchByCopy() {
    const auto kv = AllPages();
    int32_t next = 0;
    const auto take = [&](chunk::Chunk&& chunk) {
      return pool_->WritePages(kv->PagesOfChunk(next++), chunk.payload.data()).ok();
    };
    SPLICE_CHECK(store_->GetLeading(prefix_keys_, Deadline(), take).value_or(0) == prefix_keys_.size(), "all");
  }

  const Setup setup_;
  const std::shared_ptr<const engine::Model> model_;
  const size_t payload_bytes_;
  const int32_t num_chunks_;
  std::unique_ptr<transport::KvTransport> client_;
  std::unique_ptr<transport::RegisteredMemory> memory_;
  std::unique_ptr<engine::PagePool> pool_;
  engine::KvShape shape_;
  std::vector<int32_t> tokens_;
  std::vector<chunk::ChunkKey> prefix_keys_, segment_keys_;
  std::vector<std::vector<uint32_t>> checksums_;  // of every chunk's pages
  std::unique_ptr<kvstore::KvStoreServer> server_;
  std::unique_ptr<chunk::ChunkStore> store_;
};

}  // namespace

int main(int argc, char** argv) {
  spl::log::SetLevel(spl::log::Level::kError);
  Setup setup;
  std::string bytes = "1GiB";
  CLI::App app("Measures fetches from the chunk store into KV pages.", "splice_page_fetch_bench");
  app.add_option("--bytes", bytes, "fetched in one go")->capture_default_str();
  app.add_option("--rounds", setup.rounds, "measured rounds")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--carrier", setup.carrier, "shm or tcp")->check(CLI::IsMember({"shm", "tcp"}))->capture_default_str();
  app.add_option("--store", setup.store, "HOST:PORT of a splice-kvstore with room for both copies of the bytes");
  CLI11_PARSE(app, argc, argv);
  const auto total = spl::ParseByteSize(bytes);
  if (!total.ok() || *total < (16 << 20)) {
    std::fprintf(stderr, "splice_page_fetch_bench: --bytes is a size of at least 16MiB\n");
    return 2;
  }
  setup.bytes = *total;
  Bench(setup).Run();
  return 0;
}
