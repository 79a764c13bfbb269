#include "services/router/request/earlier_reasoning.h"

#include <gtest/gtest.h>

namespace spl::router {
namespace {

std::string Rendered(const char* source, const tokenizer::ChatMessage& answer) {
  const auto chat_template = tokenizer::ChatTemplate::Parse(source, "", "");
  EXPECT_TRUE(chat_template.ok()) << chat_template.status();
  std::vector<tokenizer::ChatMessage> messages = {answer};
  NameReasoning(**chat_template, &messages);
  const auto text = (*chat_template)->Render(messages, {});
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

// As gpt-oss has it.
constexpr char kThinking[] =
    "{% for message in messages %}{% if message.thinking and message.content and message.tool_calls %}"
    "{{ raise_exception('both') }}{% endif %}[{{ message.thinking }}]{{ message.content }}{% endfor %}";
constexpr char kCalls[] = R"({"reasoning_content":"hm","tool_calls":[{"function":{"name":"f","arguments":{}}}]})";

TEST(EarlierReasoningTest, HasTheNameThatTheTemplateReads) {
  EXPECT_EQ(Rendered(kThinking, {"assistant", "yes", R"({"reasoning_content":"hm"})"}), "[hm]yes");
  EXPECT_EQ(Rendered(kThinking, {"assistant", "yes", R"({"reasoning_content":"hm","thinking":"own"})"}), "[own]yes");
  EXPECT_EQ(Rendered(kThinking, {"assistant", "", kCalls}), "[hm]");
  EXPECT_EQ(Rendered(kThinking, {"assistant", "yes", kCalls}), "[]yes") << "the template has a place for one of them";
  EXPECT_EQ(Rendered(kThinking, {"user", "yes", R"({"reasoning_content":"hm"})"}), "[]yes");
  EXPECT_EQ(Rendered("{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
                     {"assistant", "yes", R"({"reasoning_content":"hm"})"}),
            "hm");
}

}  // namespace
}  // namespace spl::router
