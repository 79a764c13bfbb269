// Every port of a whole cluster in this process: any bytes as an HTTP connection to the router, or as the request of
// any method of any gRPC service. Whatever they are, the programs go on: nothing crashes, and calls end.
//
// The first byte chooses: 0 the HTTP port, else a method, or a whole ticket whose fields the rest is the seed of: what
// its holder may do with it, with right checksums, so that what lies behind these is reached, too. Else the rest is
// what is sent. Every other input is made anew: a request line of a known path, or a message of the method's type with
// random fields. Runs from the source root, for the model.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend/backend.h"
#include "services/base/address.h"
#include "services/base/log.h"
#include "services/decode/decode_server.h"
#include "services/kvstore/kvstore_server.h"
#include "services/prefill/prefill_server.h"
#include "services/router/router_server.h"
#include "services/wire/convert.h"
#include "spl/v1/admin.pb.h"
#include "spl/v1/decode.grpc.pb.h"
#include "spl/v1/decode.pb.h"
#include "spl/v1/inference.pb.h"
#include "spl/v1/kvstore.pb.h"
#include "spl/v1/kvstore_admin.pb.h"
#include "spl/v1/kvstore_records.pb.h"
#include "spl/v1/prefill.pb.h"
#include "tests/support/ticket_checksums.h"
#include "tests/support/uninterrupted.h"

namespace spl {
namespace {

constexpr char kModel[] = "models/splice-tiny";
// Words that some field means something by.
constexpr const char* kWords[] = {"",          "exact", "splice",  "sparsex", "samkv", "redknot",
                                  "loopserve", "auto",  "dense",   "sparcas", "quest", "strict",
                                  "d",         "p",     "default", "name",    "0.25",  "\xff\xfe"};
constexpr const char* kPaths[] = {"/v1/completions",
                                  "/v1/chat/completions",
                                  "/v1/models",
                                  "/tokenize",
                                  "/detokenize",
                                  "/metrics",
                                  "/control/v1/status",
                                  "/control/v1/workers/d/drain",
                                  "/control/v1/requests/x/cancel",
                                  "/debug/requests",
                                  "/admin/v1/namespaces",
                                  "/admin/v1/knowledge_bases/a/versions/1",
                                  "/ui",
                                  "/ui/app.js",
                                  "/control/v1/history?seconds=60",
                                  "/control/v1/requests/x",
                                  "/%zz"};
constexpr const char* kBodies[] = {R"({"prompt":"a b","max_tokens":2})",
                                   R"({"messages":[{"role":"user","content":"x"}]})",
                                   R"({"draining":false})",
                                   R"({"name":"n"})",
                                   "{",
                                   ""};

// Random fields of a message, to some depth.
void Fill(google::protobuf::Message& message, std::mt19937& random, int depth) {
  using Field = google::protobuf::FieldDescriptor;
  const auto& reflection = *message.GetReflection();
  const auto number = [&]() -> uint64_t {
    constexpr uint64_t kEdges[] = {0, 1, 2, 63, 64, 65, 1000, INT32_MAX, UINT32_MAX, UINT64_MAX};
    return random() % 3 == 0 ? kEdges[random() % std::size(kEdges)] : random() % 300;
  };
  const auto text = [&]() -> std::string {
    if (random() % 2 == 0) return kWords[random() % std::size(kWords)];
    constexpr size_t kSizes[] = {1, 16, 31, 32, 64, 200};
    std::string bytes(kSizes[random() % std::size(kSizes)], '\0');
    for (char& c : bytes) c = static_cast<char>(random() % 4 == 0 ? random() : 'a');
    return bytes;
  };
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const Field* const field = message.GetDescriptor()->field(i);
    if (random() % 3 == 0 || (field->cpp_type() == Field::CPPTYPE_MESSAGE && depth == 0)) continue;
    for (int n = field->is_repeated() ? static_cast<int>(random() % 4) : 1; n > 0; --n) {
      const bool add = field->is_repeated();
#define SPLICE_SET(Type, value) \
  add ? reflection.Add##Type(&message, field, value) : reflection.Set##Type(&message, field, value)
      switch (field->cpp_type()) {
        case Field::CPPTYPE_INT32:
          SPLICE_SET(Int32, static_cast<int32_t>(number()));
          break;
        case Field::CPPTYPE_INT64:
          SPLICE_SET(Int64, static_cast<int64_t>(number()));
          break;
        case Field::CPPTYPE_UINT32:
          SPLICE_SET(UInt32, static_cast<uint32_t>(number()));
          break;
        case Field::CPPTYPE_UINT64:
          SPLICE_SET(UInt64, number());
          break;
        case Field::CPPTYPE_DOUBLE:
          SPLICE_SET(Double, random() % 8 == 0 ? std::nan("") : static_cast<double>(number()) / 64);
          break;
        case Field::CPPTYPE_FLOAT:
          SPLICE_SET(Float, static_cast<float>(number()) / 64);
          break;
        case Field::CPPTYPE_BOOL:
          SPLICE_SET(Bool, random() % 2 == 0);
          break;
        case Field::CPPTYPE_ENUM:
          SPLICE_SET(EnumValue, static_cast<int>(random() % 5));
          break;
        case Field::CPPTYPE_STRING:
          SPLICE_SET(String, text());
          break;
        case Field::CPPTYPE_MESSAGE:
          Fill(add ? *reflection.AddMessage(&message, field) : *reflection.MutableMessage(&message, field), random,
               depth - 1);
          break;
      }
#undef SPLICE_SET
    }
  }
}

constexpr std::chrono::milliseconds kDeadline{2'000}, kHang{20'000};

template <typename T>
T Must(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
  std::exit(1);
}

class Cluster {
 public:
  static Cluster& Get() {
    static auto* const cluster = new Cluster;  // lives as long as the process
    return *cluster;
  }

  // An input that Take understands.
  std::string Make(std::mt19937& random) const {
    const size_t which = random() % (methods_.size() + 12);
    if (which >= methods_.size() + 4) {
      std::string seed(1 + 8, static_cast<char>(methods_.size() + 1));
      for (size_t i = 1; i < seed.size(); ++i) seed[i] = static_cast<char>(random());
      return seed;
    }
    if (which < methods_.size()) {
      const std::unique_ptr<google::protobuf::Message> message(methods_[which].request->New());
      Fill(*message, random, 4);
      return static_cast<char>(which + 1) + message->SerializePartialAsString();
    }
    const std::string body = kBodies[random() % std::size(kBodies)];
    return std::string(1, '\0') + (random() % 2 == 0 ? "GET " : "POST ") + kPaths[random() % std::size(kPaths)] +
           " HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body;
  }

  Cluster() {
    log::SetLevel(log::Level::kOff);
    kvstore::KvStoreOptions s;
    s.memory_bytes = 32 << 20;
    store_ = Must(kvstore::KvStoreServer::Start(s));
    model_ = Must(engine::Model::Load(kModel, kernels::MakeCpuBackend(), {}));
    const auto& model = model_;
    decode::DecodeServerOptions d;
    d.worker_id = "d";
    d.kv_bytes = 48 << 20;
    d.engine.executor.num_threads = 1;
    decode_ = Must(decode::DecodeServer::Start(model, d));
    prefill::PrefillServerOptions p;
    p.worker_id = "p";
    p.kv_bytes = 48 << 20;
    p.engine.executor.num_threads = 1;
    p.store_address = store_->grpc_address();
    prefill_ = Must(prefill::PrefillServer::Start(model, p));
    router::RouterOptions r;
    r.model_dir = kModel;
    r.http.listen = r.grpc_listen = "127.0.0.1:0";
    r.dispatch.fleet.prefill = {prefill_->grpc_address()};
    r.dispatch.fleet.decode = {decode_->grpc_address()};
    r.knowledge_bases.store = store_->grpc_address();
    router_ = Must(router::RouterServer::Start(r));
    decode_stub_ =
        v1::Decode::NewStub(grpc::CreateChannel(decode_->grpc_address(), grpc::InsecureChannelCredentials()));
    Add(decode_->grpc_address(), v1::GetDecodeInfoRequest::descriptor());
    Add(prefill_->grpc_address(), v1::GetPrefillInfoRequest::descriptor());
    Add(router_->grpc_address(), v1::GenerateRequest::descriptor());
    Add(router_->grpc_address(), v1::KnowledgeBase::descriptor());
    for (const google::protobuf::Descriptor* of_file :
         {v1::ChunkMeta::descriptor(), v1::Record::descriptor(), v1::Namespace::descriptor()})
      Add(store_->grpc_address(), of_file);
    while (!router_->ready()) poll(nullptr, 0, 10);
  }

  void Take(const uint8_t* data, size_t size) {
    const size_t which = data[0] % (methods_.size() + 2);
    const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
    if (which == 0) return Http(bytes);
    if (which <= methods_.size()) return Call(methods_[which - 1], bytes);
    std::seed_seq seed(bytes.begin(), bytes.end());
    UseTicket(std::mt19937(seed));
  }

 private:
  struct Method {
    std::shared_ptr<grpc::GenericStub> stub;
    std::string path;
    bool streams;
    const google::protobuf::Message* request;
  };

  // All methods of the services in the file of a message.
  void Add(const std::string& address, const google::protobuf::Descriptor* of_file) {
    const auto stub =
        std::make_shared<grpc::GenericStub>(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    const google::protobuf::FileDescriptor* const file = of_file->file();
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const auto* const method = file->service(s)->method(m);
        if (method->name() == "SetDraining") continue;  // does what it is for: nothing would be served any more
        methods_.push_back({stub, "/" + file->service(s)->full_name() + "/" + method->name(),
                            method->client_streaming() || method->server_streaming(),
                            google::protobuf::MessageFactory::generated_factory()->GetPrototype(method->input_type())});
      }
    }
  }

  void Call(const Method& method, const std::string& bytes) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    grpc::CompletionQueue queue;
    grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::Status status;
    const auto next = [&](void* expected) {
      void* tag = nullptr;
      bool ok = false;
      if (queue.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kHang) !=
              grpc::CompletionQueue::NextStatus::GOT_EVENT ||
          tag != expected)
        std::abort();  // it does not end
      return ok;
    };
    if (!method.streams) {
      const auto call = method.stub->PrepareUnaryCall(&context, method.path, request, &queue);
      call->StartCall();
      call->Finish(&response, &status, &queue);
      next(&queue);
      return;
    }
    const auto call = method.stub->PrepareCall(&context, method.path, &queue);
    call->StartCall(&queue);
    if (next(&queue)) {
      call->WriteLast(request, {}, &queue);
      if (next(&queue)) {
        call->Read(&response, &queue);
        next(&queue);
      }
    }
    context.TryCancel();
    call->Finish(&status, &queue);
    next(&queue);
  }

  // Reserves, commits with the checksums of whatever lies in the pages, reads some of the stream, releases.
  void UseTicket(std::mt19937 random) {
    const auto id = [&]() -> uint32_t {
      constexpr uint32_t kEdges[] = {4095, 4096, INT32_MAX - 255, INT32_MAX, 1u << 31, UINT32_MAX};
      return random() % 16 == 0 ? kEdges[random() % std::size(kEdges)] : random() % 4096;
    };
    const auto call = [](grpc::ClientContext& context) -> grpc::ClientContext* {
      context.set_deadline(std::chrono::system_clock::now() + kDeadline);
      return &context;
    };
    v1::ReserveRequest reserve;
    reserve.set_model_fingerprint(wire::ToBytes(model_->kv_fingerprint()));
    const uint32_t tokens = 1 + random() % 200;
    reserve.set_prompt_tokens(tokens);
    const bool edges = random() % 4 == 0;  // of a whole prompt some id nearly always is one
    for (uint32_t i = 0; i < tokens; ++i) reserve.add_token_ids(edges ? id() : random() % 4096);
    if (random() % 3 == 0) reserve.set_num_output_tokens(random() % (tokens + 2));
    if (random() % 2 == 0) Fill(*reserve.mutable_sampling(), random, 1);
    if (random() % 2 == 0) reserve.mutable_sampling()->set_repetition_penalty(1.5);
    if (random() % 3 == 0) Fill(*reserve.mutable_reuse(), random, 1);
    reserve.mutable_sampling()->set_max_tokens(1 + random() % 20);
    v1::Ticket ticket;
    grpc::ClientContext reserving, committing, streaming, releasing;
    if (!decode_stub_->Reserve(call(reserving), reserve, &ticket).ok()) return;
    if (ticket.hole_begin().empty()) {
      v1::CommitRequest commit = Must(test::CommitOf(ticket, decode_->pool(), tokens));
      if (random() % 8 == 0) commit.set_num_tokens(id());
      if (random() % 8 == 0) Fill(*commit.add_kept(), random, 1);
      if (random() % 8 == 0) Fill(*commit.mutable_only(), random, 1);
      for (uint32_t n = std::max(reserve.sampling().n(), 1u) % 200 + (random() % 16 == 0); n > 0; --n)
        commit.add_first_tokens()->set_token_id(id());
      v1::CommitResponse committed;
      (void)decode_stub_->Commit(call(committing), commit, &committed);
      v1::StreamRequest request;
      request.set_ticket_id(ticket.ticket_id());
      request.set_generation(ticket.generation());
      const auto reader = decode_stub_->Stream(call(streaming), request);
      v1::StreamChunk chunk;
      for (size_t reads = random() % 20; reads > 0 && reader->Read(&chunk);) --reads;
      streaming.TryCancel();
      (void)reader->Finish();
    }
    v1::ReleaseRequest release;
    release.set_ticket_id(ticket.ticket_id());
    release.set_generation(ticket.generation());
    release.set_writer_quiet(true);
    v1::ReleaseResponse released;
    (void)decode_stub_->Release(call(releasing), release, &released);
  }

  void Http(const std::string& bytes) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(Must(ParseHostPort(router_->http_address())).port);
    const linger at_once{.l_onoff = 1, .l_linger = 0};  // a local port is free again when the connection is closed
    ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    if (fd < 0 || !testing::Connected(fd, to)) std::abort();
    (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::shutdown(fd, SHUT_WR);
    char buffer[4096];
    pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
    do {
      if (testing::Uninterrupted([&] { return ::poll(&ready, 1, static_cast<int>(kHang.count())); }) != 1)
        std::abort();  // it neither answers nor closes
    } while (testing::Uninterrupted([&] { return ::recv(fd, buffer, sizeof buffer, 0); }) > 0);
    ::close(fd);
  }

  std::shared_ptr<const engine::Model> model_;
  std::unique_ptr<v1::Decode::Stub> decode_stub_;
  std::unique_ptr<kvstore::KvStoreServer> store_;
  std::unique_ptr<decode::DecodeServer> decode_;
  std::unique_ptr<prefill::PrefillServer> prefill_;
  std::unique_ptr<router::RouterServer> router_;
  std::vector<Method> methods_;
};

}  // namespace
}  // namespace spl

// UCX keeps a little of what it finds out about the machine, once.
extern "C" const char* __lsan_default_suppressions();  // NOLINT: LeakSanitizer's name
const char* __lsan_default_suppressions() { return "leak:libucs\nleak:libuct\nleak:libucp\n"; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) spl::Cluster::Get().Take(data, size);
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  std::mt19937 random(seed);
  if (random() % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string made = spl::Cluster::Get().Make(random);
  const size_t count = std::min(made.size(), max_size);
  std::copy_n(made.begin(), count, data);
  return count;
}
