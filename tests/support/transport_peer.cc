// The other process of the transport tests: offers memory, and answers what stands in it.
//
//   splice_transport_peer CARRIERS BYTES
//
// prints "memory ADDRESS HOST_ID BASE SIZE RKEY_HEX"; then for each line "hash OFFSET BYTES" on stdin the FNV-1a hash
// of that range in hex, and for "connect ADDRESS HOST_ID BASE SIZE RKEY_HEX" with "writer ADDRESS": it has a channel
// into that memory from then on. Ends at end of file.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "services/base/ids.h"
#include "services/transport/kv_transport.h"
#include "tests/support/fnv.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  spl::transport::TransportOptions options;
  options.carriers = argv[1];
  auto transport = spl::transport::KvTransport::Create(options);
  if (!transport.ok()) {
    std::fprintf(stderr, "%s\n", transport.status().ToString().c_str());
    return 1;
  }
  auto memory = (*transport)->Allocate(std::strtoull(argv[2], nullptr, 10));
  if (!memory.ok()) return 1;
  const std::string& rkey = (*memory)->packed_rkey();
  const std::string hex = spl::HexEncode({reinterpret_cast<const uint8_t*>(rkey.data()), rkey.size()});
  std::printf("memory %s %s %" PRIuPTR " %zu %s\n", (*transport)->listen_address().c_str(),
              spl::transport::HostId().c_str(), reinterpret_cast<uintptr_t>((*memory)->data()), (*memory)->size(),
              hex.c_str());
  std::fflush(stdout);
  std::vector<std::unique_ptr<spl::transport::KvChannel>> channels;
  char command[16];
  while (std::scanf(" %15s", command) == 1) {
    if (std::string(command) == "connect") {
      char address[128], host[256], rkey_hex[4096];
      unsigned long long base, size;
      if (std::scanf(" %127s %255s %llu %llu %4095s", address, host, &base, &size, rkey_hex) != 5) return 2;
      auto channel =
          (*transport)
              ->Connect({address, spl::HexDecode(rkey_hex).value(), base, size, host}, std::chrono::seconds(10));
      if (!channel.ok()) return 3;
      channels.push_back(std::move(*channel));
      std::printf("writer %s\n", channels.back()->local_address().c_str());
    } else {
      size_t offset, bytes;
      if (std::scanf(" %zu %zu", &offset, &bytes) != 2) return 2;
      std::printf("%016" PRIx64 "\n", spl::testing::Fnv1a((*memory)->data() + offset, bytes));
    }
    std::fflush(stdout);
  }
  channels.clear();
  memory->reset();
  (*transport)->Stop();
  return 0;
}
