// Receipts as people are shown them: by the declaration of the message.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "services/router/request/openai_response.h"

namespace spl::router {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Every field of the message, each another value.
void FillAll(Message& message, int& next) {
  const auto* reflection = message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    const int value = next++;
    if (field->is_map()) {
      Message* entry = reflection->AddMessage(&message, field);
      FillAll(*entry, next);
      continue;
    }
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        reflection->SetString(&message, field, "text " + std::to_string(value));
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        reflection->SetBool(&message, field, true);
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        reflection->SetUInt32(&message, field, static_cast<uint32_t>(value));
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        reflection->SetUInt64(&message, field, static_cast<uint64_t>(value));
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        reflection->SetDouble(&message, field, value / 1024.0);
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        FillAll(*reflection->MutableMessage(&message, field), next);
        break;
      default:
        FAIL() << "a field of a new type: " << field->full_name();
    }
  }
}

// Leaves of a JSON value, each other value once.
void Collect(const OrderedJson& json, std::multiset<std::string>* leaves) {
  if (!json.is_object()) leaves->insert(json.dump());
  if (json.is_object()) {
    for (const auto& member : json) Collect(member, leaves);
  }
}

TEST(ReceiptJsonTest, ShowsEveryFieldOfTheMessage) {
  v1::Receipt receipt;
  int next = 1;
  FillAll(receipt, next);
  ASSERT_FALSE(HasFailure());
  const OrderedJson shown = ReceiptJson(receipt);
  std::multiset<std::string> leaves;
  Collect(shown, &leaves);
  // Each message and each map took a number for itself, a map one for its key.
  const int messages = 8, maps = 2;
  EXPECT_EQ(static_cast<int>(leaves.size()), next - 1 - messages - 2 * maps) << shown.dump(1);
  EXPECT_EQ(std::set<std::string>(leaves.begin(), leaves.end()).size(), leaves.size()) << shown.dump(1);
}

TEST(ReceiptJsonTest, IsWhatTheDocumentationShows) {
  v1::Receipt receipt;
  receipt.set_reuse_policy("exact");
  receipt.set_decode_selector("dense");
  receipt.set_exact(true);
  receipt.set_prompt_tokens(2048);
  receipt.set_bytes_moved(77);
  receipt.set_seed(uint64_t{1} << 63);
  receipt.set_prefill("pool");
  receipt.set_attempts(1);
  receipt.set_weights("fp8-e4m3-channel");
  receipt.set_kv_dtype("fp8");
  receipt.set_ttft_seconds(0.5);
  (*receipt.mutable_ttft_stages())["queue"] = 0.125;
  (*receipt.mutable_ttft_stages())["prefill"] = 0.375;
  EXPECT_EQ(
      ReceiptJson(receipt).dump(),
      R"({"reuse":"exact","decode":"dense","exact":true,"tokens":{"prompt":2048,"cached":0,"stored":0,"aligned":0,)"
      R"("recomputed":0,"computed":0},"bytes":{"fetched":0,"moved":77,"decode_kv":0},"seconds":{"queue":0.0,)"
      R"("lookup":0.0,"fetch":0.0,"prefill":0.0,"transfer":0.0,"ttft":0.5},"ttft_stages":{"prefill":0.375,)"
      R"("queue":0.125},"seed":9223372036854775808,"prefill":"pool","workers":{"prefill":"","decode":""},)"
      R"("transport":"","attempts":1,"migrations":0,"types":{"weights":"fp8-e4m3-channel","kv":"fp8"}})");
  receipt.mutable_samkv()->set_kept_share(0.25);
  receipt.mutable_decode_choice()->set_chosen_tokens(7);
  receipt.set_session_tokens(64);
  receipt.set_first_logits(std::string(3, '\0'));
  (*receipt.mutable_knowledge_bases())["ships"] = 3;
  const OrderedJson shown = ReceiptJson(receipt);
  EXPECT_EQ(shown["samkv"], (OrderedJson{{"kept_share", 0.25}, {"summaries_computed", 0}}));
  EXPECT_EQ(shown["decode_choice"],
            (OrderedJson{{"dense_tokens", 0}, {"chosen_tokens", 7}, {"changes", 0}, {"guarded_heads", 0}}));
  EXPECT_EQ(shown["tokens"]["session"], 64);
  EXPECT_EQ(shown["first_logits"], "AAAA");
  EXPECT_EQ(shown["knowledge_bases"]["ships"], 3);
}

}  // namespace
}  // namespace spl::router
