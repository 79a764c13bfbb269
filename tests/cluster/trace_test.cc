// One request through the four programs gives one connected tree of spans; one that is not sampled gives none.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "spl/v1/inference.grpc.pb.h"
#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/otlp_collector.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;
using spl::testing::OtlpCollector;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using Spans = std::vector<OtlpCollector::ReceivedSpan>;

const std::set<std::string> kNames = {
    "router.request",  "router.accept",    "router.tokenize",    "router.queue",   "router.dispatch", "router.reserve",
    "router.prefill",  "router.deliver",   "router.decode",      "prefill.run",    "prefill.queue",   "prefill.match",
    "prefill.fetch",   "prefill.compute",  "prefill.push",       "prefill.commit", "decode.reserve",  "decode.land",
    "decode.sequence", "decode.admission", "decode.first_token", "decode.stream",  "store.lease"};

class TraceClusterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::vector<std::string> flags = {"--otlp-endpoint", collector_.endpoint()};
    ClusterConfig config;
    config.model_dir = kTinyModel;
    config.store_flags = config.router_flags = flags;
    config.prefill_flags = {"--kv-bytes", "128MiB", "--threads", "1", "--otlp-endpoint", collector_.endpoint()};
    config.decode_flags = config.prefill_flags;
    cluster_ = ProcessCluster::Start(config);
    ASSERT_NE(cluster_, nullptr);
  }

  HttpReply Complete(const std::map<std::string, std::string>& headers) {
    std::string prompt = "Run " + std::to_string(++run_) + ".";
    for (int i = 0; i < 30; ++i) prompt += " The captain of ship " + std::to_string(i * i + run_) + " is lost.";
    const json body = {
        {"model", "splice-tiny"}, {"prompt", prompt}, {"max_tokens", 8}, {"temperature", 0}, {"ignore_eos", true}};
    return HttpPost(cluster_->http(), "/v1/completions", body.dump(), headers);
  }
  // All that there is of the trace, once every program has said its part.
  Spans WaitForTree(const std::string& trace_id) {
    const auto names = [&] {
      std::set<std::string> out;
      for (const auto& span : collector_.spans(trace_id)) out.insert(span.name);
      return out;
    };
    EXPECT_TRUE(Eventually([&] { return names().size() >= kNames.size(); }));
    EXPECT_THAT(names(), IsSupersetOf(kNames));
    return collector_.spans(trace_id);
  }
  // Every span hangs on another one, and the first on the client's.
  void ExpectOneTree(const Spans& spans, const std::string& clients_span) {
    std::map<std::string, const OtlpCollector::ReceivedSpan*> by_id;
    for (const auto& span : spans) EXPECT_TRUE(by_id.emplace(span.span_id, &span).second) << span.name;
    int roots = 0;
    for (const auto& span : spans) {
      EXPECT_GE(span.end_ns, span.start_ns) << span.name;
      EXPECT_TRUE(span.status.is_null()) << span.name << ": " << span.status;
      if (span.parent_id == clients_span) {
        ++roots;
        EXPECT_EQ(span.name, "router.request");
        continue;
      }
      const auto parent = by_id.find(span.parent_id);
      ASSERT_NE(parent, by_id.end()) << span.name << " has no parent";
      EXPECT_GE(span.start_ns, parent->second->start_ns - 1'000'000) << span.name << " in " << parent->second->name;
    }
    EXPECT_EQ(roots, 1);
  }
  static std::string ParentOf(const Spans& spans, const std::string& name) {
    std::map<std::string, std::string> names;
    for (const auto& span : spans) names[span.span_id] = span.name;
    for (const auto& span : spans) {
      if (span.name == name) return names[span.parent_id];
    }
    return "not there";
  }

  OtlpCollector collector_;
  std::unique_ptr<ProcessCluster> cluster_;
  int run_ = 0;
};

TEST_F(TraceClusterTest, OneRequestIsOneTree) {
  const std::string trace_id = "4bf92f3577b34da6a3ce929d0e0e4736", span_id = "00f067aa0ba902b7";
  const HttpReply reply =
      Complete({{"traceparent", "00-" + trace_id + "-" + span_id + "-01"}, {"tracestate", "vendor=1"}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Spans spans = WaitForTree(trace_id);
  ExpectOneTree(spans, span_id);
  std::set<std::string> programs;
  for (const auto& span : spans) {
    programs.insert(span.program);
    EXPECT_EQ(span.state, "vendor=1") << span.name;
    if (span.name == "router.request") {
      EXPECT_EQ(reply.headers.at("traceparent"), "00-" + trace_id + "-" + span.span_id + "-01");
      EXPECT_EQ(span.attributes.at("splice.output_tokens")["intValue"], "8");
    }
  }
  EXPECT_EQ(programs, (std::set<std::string>{"splice-router", "splice-prefill", "splice-decode", "splice-kvstore"}));
  EXPECT_EQ(ParentOf(spans, "router.prefill"), "router.request");
  EXPECT_EQ(ParentOf(spans, "prefill.run"), "router.prefill");
  EXPECT_EQ(ParentOf(spans, "prefill.compute"), "prefill.run");
  EXPECT_EQ(ParentOf(spans, "store.lease"), "prefill.fetch");
  EXPECT_EQ(ParentOf(spans, "prefill.commit"), "prefill.push");
  EXPECT_EQ(ParentOf(spans, "decode.land"), "prefill.commit");
  EXPECT_EQ(ParentOf(spans, "decode.sequence"), "decode.land");
  EXPECT_EQ(ParentOf(spans, "decode.first_token"), "decode.sequence");
  EXPECT_EQ(ParentOf(spans, "decode.reserve"), "router.reserve");
  EXPECT_EQ(collector_.problems(), "");
  EXPECT_THAT(cluster_->router->Stderr(), HasSubstr("trace=" + trace_id));
}

TEST_F(TraceClusterTest, MetadataOfGrpcIsTheSame) {
  const std::string trace_id = "aaaabbbbccccddddeeeeffff00001111", span_id = "1234567812345678";
  v1::GenerateRequest request;
  request.set_model("splice-tiny");
  std::string prompt = "By gRPC.";
  for (int i = 0; i < 30; ++i) prompt += " The captain of ship " + std::to_string(i * i) + " is lost.";
  request.mutable_prompt()->set_text(prompt);
  request.mutable_sampling()->set_max_tokens(8);
  request.mutable_sampling()->set_ignore_eos(true);
  grpc::ClientContext context;
  context.AddMetadata("traceparent", "00-" + trace_id + "-" + span_id + "-01");
  const auto stub = v1::Inference::NewStub(grpc::CreateChannel(cluster_->grpc(), grpc::InsecureChannelCredentials()));
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  const grpc::Status status = reader->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  ExpectOneTree(WaitForTree(trace_id), span_id);
  const auto header = context.GetServerInitialMetadata().find("traceparent");
  ASSERT_NE(header, context.GetServerInitialMetadata().end());
  EXPECT_EQ(std::string(header->second.data(), header->second.size()).substr(3, 32), trace_id);
}

TEST_F(TraceClusterTest, WhatIsNotSampledIsNotExported) {
  const std::string unsampled = "11112222333344445555666677778888", sampled = "99992222333344445555666677778888";
  EXPECT_EQ(Complete({{"traceparent", "00-" + unsampled + "-00f067aa0ba902b7-00"}}).status, 200);
  const HttpReply without = Complete({});
  EXPECT_EQ(without.status, 200);
  EXPECT_EQ(without.headers.at("traceparent").substr(53), "00");  // begun here, and --trace-sample is 0
  const HttpReply malformed = Complete({{"traceparent", "00-" + unsampled + "-00f067aa0ba902b7-01-more"}});
  EXPECT_EQ(malformed.status, 200);
  EXPECT_EQ(malformed.headers.at("traceparent").substr(53), "00");
  EXPECT_EQ(malformed.headers.at("traceparent").find(unsampled), std::string::npos);
  // Behind them one that is: programs send in order.
  EXPECT_EQ(Complete({{"traceparent", "00-" + sampled + "-00f067aa0ba902b7-01"}}).status, 200);
  WaitForTree(sampled);
  for (const auto& span : collector_.spans()) EXPECT_EQ(span.trace_id, sampled) << span.name;
  EXPECT_THAT(cluster_->router->Stderr(), HasSubstr("trace=" + unsampled));  // logs of the programs can be joined
}

// The collector takes connections and says nothing: requests go on as they did.
TEST_F(TraceClusterTest, ASilentCollectorHoldsNobodyUp) {
  collector_.AnswerWith(0);
  for (int i = 0; i < 10; ++i) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(Complete({{"traceparent", "00-0000000000000000000000000000000" + std::to_string(i + 1).substr(0, 1) +
                                            "-00f067aa0ba902b7-01"}})
                  .status,
              200);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));  // a call's timeout is 5 s
  }
  EXPECT_TRUE(Eventually([&] { return collector_.num_calls() > 0; }));
}

}  // namespace
}  // namespace spl::test
