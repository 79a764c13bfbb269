// Receipts as messages and back: whatever the message has is in the struct, and in what people are shown.
#include "services/router/request/wire.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

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

TEST(WireTest, ReceiptsLoseNothing) {
  v1::Receipt receipt;
  int next = 1;
  FillAll(receipt, next);
  ASSERT_FALSE(HasFailure());
  ASSERT_GT(next, 45);
  const v1::Receipt back = ToProto(FromProto(receipt));
  std::string difference;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&difference);
  EXPECT_TRUE(differencer.Compare(receipt, back)) << difference;
  receipt.clear_lines();
  EXPECT_FALSE(FromProto(receipt).lines.has_value());
}

// What a gRPC client makes of the message is what HTTP clients get.
TEST(WireTest, ShownReceiptsAreTheSame) {
  RequestReceipt receipt;
  receipt.reuse_policy = "samkv";
  receipt.kept_share = 0.25;
  receipt.attempts = 2;
  receipt.migrations = 1;
  receipt.seed = 77;
  receipt.ttft_seconds = 0.5;
  receipt.ttft_stages = {{"queue", 0.125}, {"prefill", 0.375}};
  receipt.knowledge_bases = {{"ships", 3}};
  receipt.prefill = "pool";
  const OrderedJson shown = ReceiptJson(receipt);
  EXPECT_EQ(ReceiptJson(FromProto(ToProto(receipt))), shown);
  EXPECT_EQ(shown["attempts"], 2);
  EXPECT_EQ(shown["samkv"]["kept_share"], 0.25);
  EXPECT_EQ(shown["knowledge_bases"]["ships"], 3);
}

}  // namespace
}  // namespace spl::router
