// An option is declared once, in proto/spl/v1/reuse.proto, and has one row in a table of the engine
// (docs/extending.md).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "services/methods/methods.h"
#include "services/methods/quality.h"
#include "services/router/request/openai_request.h"
#include "services/wire/convert.h"
#include "services/wire/request_options.h"
#include "tests/support/head_class_maps.h"

namespace spl {
namespace {

using google::protobuf::FieldDescriptor;
using testing::HasSubstr;

// Options that no method's options have.
const std::set<std::string> kElsewhere = {"reuse", "decode", "reuse_auto", "publish", "quality", "return_first_logits"};

// The message with this option alone, at another value than any default.
v1::ReuseOptions With(const wire::RequestOption& option, bool truth) {
  v1::ReuseOptions proto;
  google::protobuf::Message& in = option.In(proto);
  const auto& reflection = *in.GetReflection();
  const FieldDescriptor* const field = option.field;
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) reflection.SetBool(&in, field, truth);
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32) reflection.SetUInt32(&in, field, 77);
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) reflection.SetDouble(&in, field, 0.625);
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) reflection.SetString(&in, field, "a word");
  return proto;
}

std::string JsonOf(const wire::RequestOption& option) {
  switch (option.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return "77";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "0.625";
    case FieldDescriptor::CPPTYPE_STRING:
      return option.name() == "quality" ? R"("strict")" : option.name() == "reuse" ? R"("exact")" : R"("dense")";
    default:
      return "true";
  }
}

template <typename Options>
bool Reads(const engine::OptionField<Options>& row, const Options& with) {
  return std::visit([&](auto member) { return with.*member != Options().*member; }, row.member);
}

TEST(OptionTable, HasEveryOptionOfTheMessageOnce) {
  std::multiset<std::string> rows(kElsewhere.begin(), kElsewhere.end());
  for (const auto& row : engine::kReuseOptionFields) rows.emplace(row.name);
  for (const auto& row : engine::kDecodeOptionFields) rows.emplace(row.name);
  for (const wire::RequestOption& option : wire::RequestOptions())
    EXPECT_EQ(rows.count(option.name()), 1u) << option.name();
  EXPECT_EQ(rows.size(), wire::RequestOptions().size());
}

TEST(OptionTable, EveryRowIsReadAndMakesAnotherMethod) {
  for (const auto& row : engine::kReuseOptionFields) {
    const wire::RequestOption& option = wire::FindRequestOption(row.name);
    const engine::ReuseOptions yes = wire::FromProto(With(option, true)), no = wire::FromProto(With(option, false));
    EXPECT_TRUE(Reads(row, yes) || Reads(row, no)) << row.name;
    const std::string unset = MethodOf(engine::ReuseOptions());
    EXPECT_TRUE(MethodOf(yes) != unset || MethodOf(no) != unset) << row.name;
  }
  for (const auto& row : engine::kDecodeOptionFields)
    EXPECT_TRUE(Reads(row, wire::DecodeOptionsOf(With(wire::FindRequestOption(row.name), true)))) << row.name;
}

absl::StatusOr<v1::ReuseOptions> Parse(const std::string& splice) {
  auto request = router::ParseCompletionBody(R"({"prompt":"x","splice":{)" + splice + "}}");
  if (!request.ok()) return request.status();
  return request->generation.reuse;
}

TEST(OptionTable, TheHttpApiReadsEveryOptionWithAndWithoutItsGroup) {
  for (const wire::RequestOption& option : wire::RequestOptions()) {
    const std::string member = "\"" + option.name() + "\":" + JsonOf(option);
    const auto reuse = Parse(member);
    ASSERT_TRUE(reuse.ok()) << member << reuse.status();
    EXPECT_TRUE(option.IsSet(*reuse)) << member;
    const std::string bad = "\"" + option.name() + "\":[]";
    EXPECT_THAT(std::string(Parse(bad).status().message()), HasSubstr("splice." + option.name())) << bad;
    if (option.group == nullptr) continue;
    const std::string nested = "\"" + option.group->name() + "\":{" + member + "}";
    const auto same = Parse(nested);
    ASSERT_TRUE(same.ok()) << nested << same.status();
    EXPECT_EQ(same->SerializeAsString(), reuse->SerializeAsString()) << nested;
    EXPECT_THAT(std::string(Parse(nested + "," + member).status().message()), HasSubstr("stands in")) << nested;
  }
  EXPECT_THAT(std::string(Parse(R"("samkv":{"fusio":true})").status().message()), HasSubstr("splice.samkv.fusio"));
  EXPECT_THAT(std::string(Parse(R"("samkv":7)").status().message()), HasSubstr("splice.samkv"));
  EXPECT_TRUE(Parse(R"("samkv":null,"line_alpha":null)").ok());
}

// The names of the methods that an option names, and what becomes of it beside another method.
TEST(OptionTable, AnOptionThatTheNamedMethodDoesNotReadIsRefused) {
  std::set<std::string_view> readers;
  for (const wire::RequestOption& option : wire::RequestOptions()) {
    EXPECT_FALSE(option.help().empty()) << option.name();
    const std::string method = option.of_decoding ? "decode" : "reuse";
    const std::string member = ",\"" + option.name() + "\":" + JsonOf(option);
    for (const std::string_view name : option.methods) {
      if (!option.of_decoding) readers.insert(name);
      EXPECT_TRUE(option.of_decoding ? methods::FindSelector(name) != nullptr : methods::FindPolicy(name) != nullptr)
          << option.name() << " " << name;
      EXPECT_TRUE(Parse("\"" + method + "\":\"" + std::string(name) + "\"" + member).ok()) << member;
    }
    if (option.methods.empty()) continue;
    EXPECT_TRUE(Parse("\"" + method + "\":\"auto\"" + member).ok()) << member;
    const std::string other = option.of_decoding ? "dense" : "naive";
    const absl::Status refused = Parse("\"" + method + "\":\"" + other + "\"" + member).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << member;
    EXPECT_THAT(std::string(refused.message()), testing::AllOf(HasSubstr("splice." + option.name()), HasSubstr(other),
                                                               HasSubstr(std::string(option.methods.front()))));
    if (!option.of_decoding) {
      EXPECT_TRUE(Parse(R"("reuse":"naive","quality":"strict")" + member).ok()) << member;
    }
  }
  for (const methods::Policy& policy : methods::Policies())
    EXPECT_EQ(readers.contains(policy.name), policy.name != "exact" && policy.name != "naive") << policy.name;
}

TEST(OptionTable, ThePageOfTheDocumentationIsWhatTheDeclarationsSay) {
  std::ifstream file("docs/options.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(page, wire::OptionsPage()) << "build/bin/splice eval --methods > docs/options.md";
}

TEST(OptionTable, SharesAndNumbersHaveTheirRange) {
  for (const auto& row : engine::kReuseOptionFields) {
    engine::ReuseOptions options;
    std::string want;
    if (const auto* share = std::get_if<double engine::ReuseOptions::*>(&row.member)) {
      options.** share = 1.5;
      want = std::string(row.name) + " is 1.5";
    } else if (const auto* number = std::get_if<int32_t engine::ReuseOptions::*>(&row.member)) {
      options.** number = row.least - 1;
      want = std::string(row.name) + " is " + std::to_string(row.least - 1);
    } else {
      continue;
    }
    const absl::Status status = ValidateReuseOptions(options, {.num_layers = 4});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.name;
    EXPECT_THAT(std::string(status.message()), HasSubstr(want));
  }
}

engine::ModelConfig SmallModel() {
  engine::ModelConfig config;
  config.num_layers = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.max_positions = 4096;
  return config;
}

TEST(Methods, ThePoliciesAreWhatTheirTraitsSay) {
  const engine::ModelConfig config = SmallModel();
  const auto map = test::AllGlobal(config.num_layers, config.num_kv_heads);
  for (const methods::Policy& traits : methods::Policies()) {
    const engine::ReuseOptions options{.policy = std::string(traits.name)};
    const auto policy = engine::MakeRecoveryPolicy(options, config, &map);
    ASSERT_TRUE(policy.ok()) << policy.status();
    EXPECT_EQ((*policy)->name(), traits.name);
    EXPECT_EQ((*policy)->reuses_segments(), traits.reuses_segments) << traits.name;
    EXPECT_EQ((*policy)->max_segments(), static_cast<int32_t>(std::min<uint32_t>(traits.max_segments, INT32_MAX)))
        << traits.name;
    const bool needs_map = traits.head_classes == methods::HeadClasses::kAlways;
    EXPECT_EQ(engine::MakeRecoveryPolicy(options, config).ok(), !needs_map) << traits.name;
    EXPECT_EQ(engine::UsesHeadClasses(options), needs_map) << traits.name;
    EXPECT_FALSE(traits.help.empty()) << traits.name;
  }
  engine::ModelConfig windows = config;
  windows.sliding_windows.assign(4, 64);
  for (const methods::Policy& traits : methods::Policies())
    EXPECT_EQ(engine::MakeRecoveryPolicy({.policy = std::string(traits.name)}, windows, &map).ok(),
              !traits.needs_full_attention)
        << traits.name;
}

TEST(Methods, TheSelectorsAreWhatTheirTraitsSay) {
  const engine::ModelConfig config = SmallModel();
  for (const methods::Selector& traits : methods::Selectors()) {
    const engine::DecodeOptions options(std::string(traits.name));
    const auto selector = engine::MakeTokenSelector(options, config, nullptr);
    EXPECT_EQ(selector.ok(), traits.head_classes != methods::HeadClasses::kAlways) << selector.status();
    if (!selector.ok()) continue;
    EXPECT_EQ((*selector)->name(), traits.name);
    EXPECT_EQ((*selector)->of_prompt() != nullptr, traits.reads_prompt) << traits.name;
  }
}

TEST(Methods, QualityIsAWordOrAShare) {
  using methods::ParseQuality;
  for (const char* word : {"", "balanced"}) {
    ASSERT_TRUE(ParseQuality(word).has_value()) << word;
    EXPECT_FALSE(ParseQuality(word)->strict);
    EXPECT_EQ(ParseQuality(word)->agreement, 0);
  }
  for (const char* word : {"strict", "1", "1.0", "1e0"}) {
    ASSERT_TRUE(ParseQuality(word).has_value()) << word;
    EXPECT_TRUE(ParseQuality(word)->strict) << word;
  }
  EXPECT_EQ(ParseQuality("0.99")->agreement, 0.99);
  EXPECT_FALSE(ParseQuality("0.99")->strict);
  EXPECT_EQ(ParseQuality("1e-3")->agreement, 1e-3);
  for (const char* bad : {"0", "-0.5", "1.01", "nan", "inf", "0.9 ", " 0.9", "+0.9", "0,9", "best", "Strict"})
    EXPECT_FALSE(ParseQuality(bad).has_value()) << bad;
}

TEST(Methods, AutoAndStrictAreResolvedInOnePlace) {
  EXPECT_EQ(methods::PolicyOf("sparsex", "strict"), "exact");
  EXPECT_EQ(methods::PolicyOf("sparsex", "balanced"), "sparsex");
  EXPECT_EQ(methods::PolicyOf("sparsex", "0.99"), "sparsex");
  EXPECT_EQ(methods::PolicyOf("sparsex", "1"), "exact") << "no record proves it";
  EXPECT_EQ(methods::ResolvePolicy("", true, "splice"), "splice");
  EXPECT_EQ(methods::ResolvePolicy("auto", false, "splice"), "exact");
  EXPECT_EQ(methods::ResolvePolicy("naive", true, "splice"), "naive");
  EXPECT_EQ(methods::ResolvePolicy("auto", true, ""), "") << "the model is not known: a worker resolves it";
  EXPECT_EQ(methods::BestUnder(0, "splice"), "splice");
  EXPECT_EQ(methods::BestUnder(0.99, "splice"), "sparsex") << "a contract is with exact, which sees everything";
  EXPECT_EQ(methods::BestUnder(0.99, ""), "") << "the model is not known";
  EXPECT_EQ(methods::ResolveSelector("auto", true), "head_classes");
  EXPECT_EQ(methods::ResolveSelector("", false), "dense");
  EXPECT_EQ(methods::ResolveSelector("quest", true), "quest");
}

}  // namespace
}  // namespace spl
