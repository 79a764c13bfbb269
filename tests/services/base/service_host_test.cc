#include "services/base/service_host.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <future>

#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "spl/v1/kvstore.grpc.pb.h"
#include "tests/services/base/http_client.h"

namespace spl {
namespace {

using testing::HttpGet;

// GetStats answers, refuses with a retry time, or waits until told to go on, by `mode`.
class StatsService final : public v1::KvStore::CallbackService {
 public:
  enum class Mode { kAnswer, kRefuse, kHang };
  std::atomic<Mode> mode{Mode::kAnswer};
  std::promise<void> entered;
  std::promise<void> cancelled;

  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context, const v1::GetStoreStatsRequest*,
                                     v1::StoreStats* response) override {
    if (mode == Mode::kHang) return new HangingReactor(*this);
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    if (mode == Mode::kRefuse) {
      SetRetryAfter(*context, std::chrono::milliseconds(250));
      reactor->Finish(ToGrpcStatus(Errorf(absl::StatusCode::kResourceExhausted, "full")));
      return reactor;
    }
    response->set_hits(7);
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  class HangingReactor final : public grpc::ServerUnaryReactor {
   public:
    explicit HangingReactor(StatsService& service) : service_(service) { service_.entered.set_value(); }
    void OnCancel() override {
      service_.cancelled.set_value();
      Finish(grpc::Status::CANCELLED);
    }
    void OnDone() override { delete this; }

   private:
    StatsService& service_;
  };
};

ServiceHostOptions TestOptions() {
  ServiceHostOptions options;
  options.name = "test";
  return options;
}

std::unique_ptr<ServiceHost> StartHost(ServiceHostOptions options, StatsService& service, Metrics& metrics) {
  auto host = ServiceHost::Start(std::move(options), {&service}, metrics);
  EXPECT_TRUE(host.ok()) << host.status();
  return std::move(host).value();
}

std::shared_ptr<grpc::Channel> ChannelTo(const ServiceHost& host) {
  return grpc::CreateChannel(host.grpc_address(), grpc::InsecureChannelCredentials());
}

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
}

// grpc.health.v1.HealthCheckResponse.status: 1 SERVING, 2 NOT_SERVING; -1 when the call fails.
int HealthOf(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  SetDeadline(context);
  grpc::CompletionQueue queue;
  grpc::ByteBuffer request(nullptr, 0);
  grpc::ByteBuffer response;
  grpc::Status status;
  const auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  if (!status.ok() || !response.Dump(&slices).ok() || slices.empty()) return -1;
  return slices[0].size() == 2 ? slices[0].begin()[1] : -1;
}

TEST(ServiceHost, ServesReportsHealthAndMetrics) {
  StatsService service;
  Metrics metrics;
  metrics.Counter("splice_test_total", "x").Increment(5);
  const auto host = StartHost(TestOptions(), service, metrics);
  const auto channel = ChannelTo(*host);
  EXPECT_EQ(HealthOf(channel), 2);
  EXPECT_EQ(HttpGet(host->metrics_address(), "/readyz").rfind("HTTP/1.1 503", 0), 0u);
  host->SetReady(true);
  EXPECT_EQ(HealthOf(channel), 1);
  EXPECT_EQ(HttpGet(host->metrics_address(), "/readyz").rfind("HTTP/1.1 200", 0), 0u);
  EXPECT_EQ(HttpGet(host->metrics_address(), "/healthz").rfind("HTTP/1.1 200", 0), 0u);
  EXPECT_NE(HttpGet(host->metrics_address(), "/metrics").find("splice_test_total 5"), std::string::npos);

  for (const auto& to : {channel, host->InProcessChannel()}) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::StoreStats stats;
    const grpc::Status status = v1::KvStore::NewStub(to)->GetStats(&context, {}, &stats);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(stats.hits(), 7u);
  }
  host->Stop();
}

TEST(ServiceHost, ListsItsServicesByReflection) {
  StatsService service;
  Metrics metrics;
  const auto host = StartHost(TestOptions(), service, metrics);
  grpc::GenericStub stub(ChannelTo(*host));
  grpc::ClientContext context;
  SetDeadline(context);
  grpc::CompletionQueue queue;
  void* tag;
  bool ok = false;
  const auto call =
      stub.PrepareCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  const grpc::Slice list_services("\x3a\x01*", 3);  // ServerReflectionRequest{list_services: "*"}
  call->Write(grpc::ByteBuffer(&list_services, 1), nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::ByteBuffer response;
  call->Read(&response, nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::Slice slice;
  ASSERT_TRUE(response.DumpToSingleSlice(&slice).ok());
  const std::string text(reinterpret_cast<const char*>(slice.begin()), slice.size());
  EXPECT_NE(text.find("spl.v1.KvStore"), std::string::npos);
  EXPECT_NE(text.find("grpc.health.v1.Health"), std::string::npos);
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
}

TEST(ServiceHost, CarriesRetryAfter) {
  StatsService service;
  service.mode = StatsService::Mode::kRefuse;
  Metrics metrics;
  const auto host = StartHost(TestOptions(), service, metrics);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::StoreStats stats;
  const absl::Status status = FromGrpcStatus(v1::KvStore::NewStub(ChannelTo(*host))->GetStats(&context, {}, &stats));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RetryAfterOf(context), std::chrono::milliseconds(250));
}

TEST(ServiceHost, SeveralLiveInOneProcess) {
  StatsService service_a, service_b;
  Metrics metrics_a, metrics_b;
  const auto a = StartHost(TestOptions(), service_a, metrics_a);
  ServiceHostOptions quiet = TestOptions();
  quiet.metrics_listen = "";
  const auto b = StartHost(quiet, service_b, metrics_b);
  EXPECT_NE(a->grpc_address(), b->grpc_address());
  EXPECT_EQ(b->metrics_address(), "");
  a->SetReady(true);
  EXPECT_EQ(HealthOf(ChannelTo(*a)), 1);
  EXPECT_EQ(HealthOf(ChannelTo(*b)), 2);
}

TEST(ServiceHost, RefusesTakenAndMalformedAddresses) {
  StatsService service_a, service_b;
  Metrics metrics;
  const auto a = StartHost(TestOptions(), service_a, metrics);
  ServiceHostOptions same = TestOptions();
  same.listen = a->grpc_address();
  EXPECT_EQ(ServiceHost::Start(same, {&service_b}, metrics).status().code(), absl::StatusCode::kUnavailable);
  ServiceHostOptions bad = TestOptions();
  bad.listen = "no port";
  EXPECT_EQ(ServiceHost::Start(bad, {&service_b}, metrics).status().code(), absl::StatusCode::kInvalidArgument);
}

// Reads until the server closes; false when it does not within `limit`.
bool ClosesWithin(int fd, std::chrono::seconds limit) {
  const timeval timeout{.tv_sec = limit.count(), .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  char buffer[1024];
  ssize_t n;
  do n = recv(fd, buffer, sizeof(buffer), 0);
  while (n > 0);
  const bool closed = n == 0 || errno == ECONNRESET;
  close(fd);
  return closed;
}

// S5: who sends nothing, and who has nothing to say, does not stay.
TEST(ServiceHost, SilentAndIdleConnectionsAreClosed) {
  StatsService service;
  Metrics metrics;
  ServiceHostOptions options = TestOptions();
  options.handshake_timeout = std::chrono::milliseconds(200);
  options.limits.max_idle = std::chrono::milliseconds(200);
  const auto host = StartHost(options, service, metrics);
  const int silent = testing::ConnectTo(host->grpc_address());
  const int idle = testing::ConnectTo(host->grpc_address());
  const std::string preface = std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);
  ASSERT_EQ(send(idle, preface.data(), preface.size(), MSG_NOSIGNAL), static_cast<ssize_t>(preface.size()));
  EXPECT_TRUE(ClosesWithin(silent, std::chrono::seconds(20)));
  EXPECT_TRUE(ClosesWithin(idle, std::chrono::seconds(20)));
  host->Stop();
}

// S5: messages of strangers do not fill the memory; calls within the quota go on.
TEST(ServiceHost, AQuotaAndLimitsLeaveCallsAlone) {
  StatsService service;
  Metrics metrics;
  ServiceHostOptions options = TestOptions();
  options.limits = {.memory_bytes = 32 << 20,
                    .max_streams = 4,
                    .max_idle = std::chrono::minutes(1),
                    .max_age = std::chrono::minutes(1),
                    .keepalive = std::chrono::seconds(60)};
  const auto host = StartHost(options, service, metrics);
  const auto stub = v1::KvStore::NewStub(ChannelTo(*host));
  for (int i = 0; i < 100; ++i) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::StoreStats stats;
    EXPECT_TRUE(stub->GetStats(&context, {}, &stats).ok());
  }
  host->Stop();
}

TEST(ServiceHost, StopsInOrderAndCancelsWhatHangs) {
  StatsService service;
  service.mode = StatsService::Mode::kHang;
  Metrics metrics;
  ServiceHostOptions options = TestOptions();
  std::unique_ptr<ServiceHost> host;
  bool drained = false;
  options.drain_timeout = std::chrono::seconds(5);
  options.shutdown_timeout = std::chrono::milliseconds(50);
  options.drain = [&](std::chrono::steady_clock::time_point deadline) {
    EXPECT_GT(deadline, std::chrono::steady_clock::now());
    EXPECT_FALSE(host->ready());
    EXPECT_EQ(HealthOf(ChannelTo(*host)), 2) << "the server still answers while draining";
    drained = true;
  };
  host = StartHost(options, service, metrics);
  host->SetReady(true);
  std::thread caller([&] {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::StoreStats stats;
    EXPECT_FALSE(v1::KvStore::NewStub(ChannelTo(*host))->GetStats(&context, {}, &stats).ok());
  });
  service.entered.get_future().wait();
  host->Stop();
  EXPECT_TRUE(drained);
  EXPECT_EQ(service.cancelled.get_future().wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(HttpGet(host->metrics_address(), "/healthz"), "");
  caller.join();
  host->Stop();
}

}  // namespace
}  // namespace spl
