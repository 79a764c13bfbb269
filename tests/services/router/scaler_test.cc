// The router as KEDA sees it: a client generated from KEDA's protocol, and the figures beside it.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "externalscaler/externalscaler.grpc.pb.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::testing {
namespace {

class ScalerTest : public ::testing::Test {
 protected:
  ScalerTest() : cluster_(2, 3) {
    cluster_.options.dispatch.plan_interval = std::chrono::milliseconds(50);
    cluster_.options.dispatch.planner.decode.min_replicas = 5;
  }
  void Start() {
    cluster_.StartRouter();
    stub_ = externalscaler::ExternalScaler::NewStub(
        grpc::CreateChannel(cluster_.router->grpc_address(), grpc::InsecureChannelCredentials()));
  }
  static externalscaler::ScaledObjectRef Ref(const std::string& pool) {
    externalscaler::ScaledObjectRef ref;
    ref.set_name("splice-" + pool);
    (*ref.mutable_scalermetadata())["pool"] = pool;
    return ref;
  }
  grpc::Status GetMetrics(const std::string& pool, externalscaler::GetMetricsResponse* response) {
    grpc::ClientContext context;
    externalscaler::GetMetricsRequest request;
    *request.mutable_scaledobjectref() = Ref(pool);
    request.set_metricname("splice-desired-" + pool);
    return stub_->GetMetrics(&context, request, response);
  }
  int64_t WaitForMetric(const std::string& pool) {
    externalscaler::GetMetricsResponse response;
    const bool planned = test::Eventually([&] { return GetMetrics(pool, &response).ok(); });
    return planned ? response.metricvalues(0).metricvalue() : -1;
  }

  FakeCluster cluster_;
  std::unique_ptr<externalscaler::ExternalScaler::Stub> stub_;
};

TEST_F(ScalerTest, AnswersKedasFourCalls) {
  Start();
  EXPECT_EQ(WaitForMetric("decode"), 5);  // its minimum; three serve
  EXPECT_GE(WaitForMetric("prefill"), 1);
  grpc::ClientContext spec_context;
  externalscaler::GetMetricSpecResponse spec;
  ASSERT_TRUE(stub_->GetMetricSpec(&spec_context, Ref("decode"), &spec).ok());
  ASSERT_EQ(spec.metricspecs_size(), 1);
  EXPECT_EQ(spec.metricspecs(0).metricname(), "splice-desired-decode");
  EXPECT_EQ(spec.metricspecs(0).targetsize(), 1) << "so that the autoscaler divides by one";
  grpc::ClientContext active_context;
  externalscaler::IsActiveResponse active;
  ASSERT_TRUE(stub_->IsActive(&active_context, Ref("prefill"), &active).ok());
  EXPECT_TRUE(active.result());
  grpc::ClientContext stream_context;
  const auto stream = stub_->StreamIsActive(&stream_context, Ref("prefill"));
  active.Clear();
  ASSERT_TRUE(stream->Read(&active));
  EXPECT_TRUE(active.result());
  stream_context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ScalerTest, WrongPoolsAndMissingPlansAreErrors) {
  cluster_.options.dispatch.plan_interval = std::chrono::hours(1);
  Start();
  externalscaler::GetMetricsResponse response;
  EXPECT_EQ(GetMetrics("router", &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(GetMetrics("decode", &response).error_code(), grpc::StatusCode::UNAVAILABLE);
  grpc::ClientContext context;
  const auto stream = stub_->StreamIsActive(&context, Ref(""));
  externalscaler::IsActiveResponse active;
  EXPECT_FALSE(stream->Read(&active));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ScalerTest, AdviceAndMetricsSayTheSame) {
  Start();
  ASSERT_EQ(WaitForMetric("decode"), 5);
  const auto advice = Call(cluster_.http(), "GET", "/control/v1/scale");
  ASSERT_EQ(advice.status, 200);
  const auto json = nlohmann::json::parse(advice.body);
  ASSERT_EQ(json["data"].size(), 2u);
  EXPECT_EQ(json["data"][1]["pool"], "decode");
  EXPECT_EQ(json["data"][1]["current"], 3);
  EXPECT_EQ(json["data"][1]["desired"], 5);
  EXPECT_EQ(json["data"][1]["reason"], "minimum");
  const std::string metrics = Call(cluster_.http(), "GET", "/metrics").body;
  EXPECT_NE(metrics.find("splice_pool_desired_replicas{pool=\"decode\"} 5"), std::string::npos);
  EXPECT_NE(metrics.find("splice_pool_desired_reason{pool=\"decode\",reason=\"minimum\"} 1"), std::string::npos);
}

}  // namespace
}  // namespace spl::testing
