// An option is declared once, in v1.ReuseOptions, and has one row in a table of the engine (docs/extending.md).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "services/methods/methods.h"
#include "services/router/request/openai_request.h"
#include "services/wire/convert.h"
#include "tests/support/head_class_maps.h"

namespace spl {
namespace {

using google::protobuf::FieldDescriptor;
using testing::HasSubstr;

// Fields that no method's options have.
const std::set<std::string> kElsewhere = {"policy",
                                          "decode",
                                          "auto_segments",
                                          "publish",
                                          "quality",
                                          "return_first_logits",
                                          "decode_restore",
                                          "decode_restore_interval",
                                          "decode_restore_threshold"};

const FieldDescriptor& FieldOf(std::string_view name) {
  const FieldDescriptor* const field = v1::ReuseOptions::descriptor()->FindFieldByName(std::string(name));
  EXPECT_NE(field, nullptr) << name;
  return *field;
}

// The message with this field alone, at another value than any default.
v1::ReuseOptions With(const FieldDescriptor& field, bool truth) {
  v1::ReuseOptions proto;
  const auto& reflection = *proto.GetReflection();
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) reflection.SetBool(&proto, &field, truth);
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_UINT32) reflection.SetUInt32(&proto, &field, 77);
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) reflection.SetDouble(&proto, &field, 0.625);
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) reflection.SetString(&proto, &field, "a word");
  return proto;
}

template <typename Options>
bool Reads(const engine::OptionField<Options>& row, const Options& with) {
  return std::visit([&](auto member) { return with.*member != Options().*member; }, row.member);
}

TEST(OptionTable, HasEveryFieldOfTheMessageOnce) {
  std::multiset<std::string> rows(kElsewhere.begin(), kElsewhere.end());
  for (const auto& row : engine::kReuseOptionFields) rows.emplace(row.name);
  for (const auto& row : engine::kDecodeOptionFields) rows.emplace(row.name);
  const auto& type = *v1::ReuseOptions::descriptor();
  for (int i = 0; i < type.field_count(); ++i)
    EXPECT_EQ(rows.count(type.field(i)->name()), 1u) << type.field(i)->name();
  EXPECT_EQ(rows.size(), static_cast<size_t>(type.field_count()));
}

TEST(OptionTable, EveryRowIsReadAndMakesAnotherMethod) {
  for (const auto& row : engine::kReuseOptionFields) {
    const FieldDescriptor& field = FieldOf(row.name);
    const engine::ReuseOptions yes = wire::FromProto(With(field, true)), no = wire::FromProto(With(field, false));
    EXPECT_TRUE(Reads(row, yes) || Reads(row, no)) << row.name;
    const std::string unset = MethodOf(engine::ReuseOptions());
    EXPECT_TRUE(MethodOf(yes) != unset || MethodOf(no) != unset) << row.name;
  }
  for (const auto& row : engine::kDecodeOptionFields)
    EXPECT_TRUE(Reads(row, wire::DecodeOptionsOf(With(FieldOf(row.name), true)))) << row.name;
}

TEST(OptionTable, TheHttpApiReadsEveryField) {
  const auto& type = *v1::ReuseOptions::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const std::string name = field.has_json_name() ? field.json_name() : field.name();
    std::string value = "true";
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_UINT32) value = "77";
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) value = "0.625";
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING)
      value = name == "quality" ? R"("strict")" : name == "reuse" ? R"("exact")" : R"("dense")";
    const std::string body = R"({"prompt":"x","splice":{")" + name + "\":" + value + "}}";
    const auto request = router::ParseCompletionBody(body);
    ASSERT_TRUE(request.ok()) << body << request.status();
    EXPECT_TRUE(request->generation.reuse.GetReflection()->HasField(request->generation.reuse, &field)) << body;
    const std::string bad = R"({"prompt":"x","splice":{")" + name + "\":[]}}";
    EXPECT_THAT(std::string(router::ParseCompletionBody(bad).status().message()), HasSubstr("splice." + name)) << bad;
  }
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

TEST(Methods, AutoAndStrictAreResolvedInOnePlace) {
  EXPECT_EQ(methods::PolicyOf("sparsex", "strict"), "exact");
  EXPECT_EQ(methods::PolicyOf("sparsex", "balanced"), "sparsex");
  EXPECT_EQ(methods::ResolvePolicy("", true, "splice"), "splice");
  EXPECT_EQ(methods::ResolvePolicy("auto", false, "splice"), "exact");
  EXPECT_EQ(methods::ResolvePolicy("naive", true, "splice"), "naive");
  EXPECT_EQ(methods::ResolvePolicy("auto", true, ""), "") << "the model is not known: a worker resolves it";
  EXPECT_EQ(methods::ResolveSelector("auto", true), "head_classes");
  EXPECT_EQ(methods::ResolveSelector("", false), "dense");
  EXPECT_EQ(methods::ResolveSelector("quest", true), "quest");
}

}  // namespace
}  // namespace spl
