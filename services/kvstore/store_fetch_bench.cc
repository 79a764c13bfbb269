// Rates of a fetch and a put through the store, beside the transport alone and gRPC streams. They are measured in
// turns, so that all see the same state of the machine; the ratios are medians of the ratios of each round.
//
//   splice_store_fetch_bench [--bytes 1GiB] [--chunk-bytes 768KiB] [--rounds 5] [--carrier shm|tcp]
//
// One process: the store has its own threads. Medians over the rounds; GB/s are 10^9 bytes a second.
#include <grpcpp/create_channel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <map>
#include <string>
#include <vector>

#include "services/base/byte_size.h"
#include "services/base/check.h"
#include "services/base/log.h"
#include "services/chunk/remote/remote_chunk_store.h"
#include "services/kvstore/kvstore_server.h"
#include "spl/v1/kvstore_admin.grpc.pb.h"
#include "tests/support/chunks.h"

namespace {

using namespace spl;
using Clock = std::chrono::steady_clock;

struct Setup {
  uint64_t bytes = 1ull << 30;
  uint64_t chunk_bytes = 768 << 10;
  int rounds = 5;
  std::string carrier = "shm";
  uint64_t num_chunks() const { return bytes / chunk_bytes; }
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

// The transport alone: registered memory of a peer, read and written in pieces of a chunk's size.
class RawPeer {
 public:
  RawPeer(const Setup& setup, transport::KvTransport& client) : setup_(setup), peer_(MakeTransport(setup.carrier)) {
    memory_ = std::move(peer_->Allocate(setup.bytes)).value();
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
  void Get(std::byte* to) {
    std::vector<transport::GetOp> ops;
    for (uint64_t at = 0; at < setup_.bytes; at += setup_.chunk_bytes) {
      ops.push_back({to + at, at, std::min(setup_.chunk_bytes, setup_.bytes - at)});
    }
    Wait([&](auto done) { return channel_->Get(std::move(ops), std::move(done)); });
  }
  void Put(const std::byte* from) {
    std::vector<transport::PutOp> ops;
    for (uint64_t at = 0; at < setup_.bytes; at += setup_.chunk_bytes) {
      ops.push_back({from + at, at, std::min(setup_.chunk_bytes, setup_.bytes - at)});
    }
    SPLICE_CHECK(channel_->Put(std::move(ops), [](absl::Status) {}).ok(), "put");
    SPLICE_CHECK(channel_->FlushAndWait(std::chrono::minutes(5)).ok(), "flush");
  }

 private:
  template <typename Start>
  static void Wait(const Start& start) {
    std::promise<absl::Status> done;
    SPLICE_CHECK(start([&](absl::Status status) { done.set_value(std::move(status)); }).ok(), "start");
    SPLICE_CHECK(done.get_future().get().ok(), "transfer");
  }

  const Setup setup_;
  std::unique_ptr<transport::KvTransport> peer_;
  std::unique_ptr<transport::RegisteredMemory> memory_;
  std::unique_ptr<transport::KvChannel> channel_;
};

std::unique_ptr<kvstore::KvStoreServer> StartStore(const Setup& setup, const std::string& carrier) {
  kvstore::KvStoreOptions options;
  options.kv_transport = carrier;
  options.memory_bytes = setup.bytes * 3 / 2;
  return std::move(kvstore::KvStoreServer::Start(options)).value();
}

// Fetches everything into `to`, chunk after chunk, and checks that all came.
void Fetch(chunk::ChunkStore& store, const std::vector<chunk::ChunkKey>& keys, const Setup& setup, std::byte* to) {
  const auto place = [&](size_t i, const chunk::ChunkHeader& header) -> chunk::Pieces {
    return {{to + i * setup.chunk_bytes, header.payload_bytes}};
  };
  const auto got = store.FetchLeading(keys, Deadline(), place, [](size_t, const chunk::ChunkHeader&) { return true; });
  SPLICE_CHECK(got.ok() && *got == keys.size(), "every chunk is fetched");
}

void Put(chunk::ChunkStore& store, const std::vector<chunk::Chunk>& chunks) {
  const absl::Status status = store.Put(chunks, Deadline());
  SPLICE_CHECK(status.ok(), status.ToString().c_str());
}

void DeleteNamespace(const std::string& address, uint8_t space) {
  const auto admin = v1::KvStoreAdmin::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::DeleteNamespaceRequest request;
  request.set_id(std::string(32, static_cast<char>(space)));
  v1::DeleteNamespaceResponse response;
  SPLICE_CHECK(admin->DeleteNamespace(&context, request, &response).ok(), "delete");
}

void Run(const Setup& setup) {
  const auto client = MakeTransport(setup.carrier);
  std::vector<chunk::Chunk> chunks;
  std::vector<chunk::ChunkKey> keys;
  for (uint64_t n = 0; n < setup.num_chunks(); ++n) {
    chunks.push_back(testing::TestChunk(n, setup.chunk_bytes));
    keys.push_back(chunks.back().header.key);
  }
  std::vector<std::byte> memory(setup.bytes, std::byte(1));
  const uint64_t moved = setup.num_chunks() * setup.chunk_bytes;
  std::map<std::string, std::vector<double>> rates;
  {
    RawPeer raw(setup, *client);
    chunk::RemoteStoreOptions by_rma;
    by_rma.transport = client.get();
    const auto server = StartStore(setup, setup.carrier);
    const auto rma = std::move(chunk::RemoteChunkStore::Connect(server->grpc_address(), by_rma)).value();
    const auto grpc = std::move(chunk::RemoteChunkStore::Connect(server->grpc_address())).value();
    // Two rounds to warm up: every page of both regions is then mapped here.
    for (int round = -2; round < setup.rounds; ++round) {
      std::map<std::string, double> now;
      // New keys, or a put would move nothing, in a namespace that is deleted after the round.
      const auto space = static_cast<uint8_t>(round + 3);
      for (uint64_t n = 0; n < setup.num_chunks(); ++n) {
        keys[n] = testing::TestKey(n + static_cast<uint64_t>(round + 2) * setup.num_chunks());
        chunks[n].header.key = keys[n];
        chunks[n].header.namespace_id.fill(space);
      }
      now["raw put"] = GigabytesPerSecond(setup.bytes, [&] { raw.Put(memory.data()); });
      now["store put, rma"] = GigabytesPerSecond(moved, [&] { Put(*rma, chunks); });
      now["raw get"] = GigabytesPerSecond(setup.bytes, [&] { raw.Get(memory.data()); });
      now["store fetch, rma"] = GigabytesPerSecond(moved, [&] { Fetch(*rma, keys, setup, memory.data()); });
      SPLICE_CHECK(rma->data_path() == setup.carrier, "the carrier asked for");
      for (uint64_t n = 0; n < setup.num_chunks(); n += 97) {
        SPLICE_CHECK(
            std::memcmp(memory.data() + n * setup.chunk_bytes, chunks[n].payload.data(), setup.chunk_bytes) == 0,
            "the bytes that were put");
      }
      now["store fetch, grpc"] = GigabytesPerSecond(moved, [&] { Fetch(*grpc, keys, setup, memory.data()); });
      now["memcpy"] = GigabytesPerSecond(moved, [&] {
        for (uint64_t n = 0; n < setup.num_chunks(); ++n) {
          std::memcpy(memory.data() + n * setup.chunk_bytes, chunks[n].payload.data(), setup.chunk_bytes);
        }
      });
      DeleteNamespace(server->grpc_address(), space);
      if (round < 0) continue;
      for (const auto& [name, rate] : now) rates[name].push_back(rate);
      rates["fetch / raw get"].push_back(now["store fetch, rma"] / now["raw get"]);
      rates["put / raw put"].push_back(now["store put, rma"] / now["raw put"]);
    }
    const auto plain = StartStore(setup, "none");
    const auto by_stream = std::move(chunk::RemoteChunkStore::Connect(plain->grpc_address())).value();
    rates["store put, grpc"].push_back(GigabytesPerSecond(moved, [&] { Put(*by_stream, chunks); }));
  }
  client->Stop();
  std::printf("carrier %s, %llu chunks of %llu bytes, %d rounds\n", setup.carrier.c_str(),
              static_cast<unsigned long long>(setup.num_chunks()), static_cast<unsigned long long>(setup.chunk_bytes),
              setup.rounds);
  for (auto& [name, values] : rates) {
    std::sort(values.begin(), values.end());
    const bool is_ratio = name.find('/') != std::string::npos;
    std::printf("  %-18s %6.2f %s   (%.2f to %.2f)\n", name.c_str(), values[values.size() / 2],
                is_ratio ? "    " : "GB/s", values.front(), values.back());
  }
}

}  // namespace

int main(int argc, char** argv) {
  spl::log::SetLevel(spl::log::Level::kError);
  Setup setup;
  std::string bytes = "1GiB", chunk_bytes = "768KiB";
  CLI::App app("Measures fetches and puts of the chunk store.", "splice_store_fetch_bench");
  app.add_option("--bytes", bytes, "fetched in one go")->capture_default_str();
  app.add_option("--chunk-bytes", chunk_bytes, "payload of one chunk")->capture_default_str();
  app.add_option("--rounds", setup.rounds, "measured rounds")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--carrier", setup.carrier, "shm or tcp")->check(CLI::IsMember({"shm", "tcp"}))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const auto total = spl::ParseByteSize(bytes), one = spl::ParseByteSize(chunk_bytes);
  if (!total.ok() || !one.ok() || *one == 0 || *total < *one) {
    std::fprintf(stderr,
                 "splice_store_fetch_bench: --bytes and --chunk-bytes are sizes, the first at least the second\n");
    return 2;
  }
  setup.bytes = *total;
  setup.chunk_bytes = *one;
  Run(setup);
  return 0;
}
