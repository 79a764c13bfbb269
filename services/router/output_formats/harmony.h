// Messages in channels, with reasoning, content and calls: gpt-oss.
//
//   <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
//   <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//
// The prompt ends with <|start|>assistant, so that the answer begins inside of a header. The recipient may stand in
// front of the channel, and words behind either.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

inline constexpr std::string_view kHarmonyReasoning = "<|channel|>analysis<|message|>";

// The channel analysis is reasoning, final and commentary are content, and so are messages without a channel and
// answers without messages. An empty line separates messages of one kind. A message to functions.NAME is a call, in any
// channel, from the bracket on with which it begins, and its arguments come out while they are written. Other messages
// are content with their header, and so are headers that do not end.
//
// `tools`: null if none may be called. `in_reasoning`: the prompt ends with kHarmonyReasoning. The tags are special
// tokens, which must be in the text (NeedsSpecialTokens). `by_grammar`: the answer is what HarmonyAnswer makes it. The
// first message that is content then goes on to the end, whatever its text looks like.
std::unique_ptr<OutputParser> MakeHarmony(const CallableTools* tools, bool in_reasoning, bool by_grammar = false);

// One call, whether or not more may be made: the token behind it ends the answer.
absl::StatusOr<GrammarPart> HarmonyGrammar(const ForcedTools& tools);

// An answer whose content is in a given form: any number of messages of reasoning, then `content` as the message of the
// channel final, in whose header the model may write that it is JSON if it `is_json`. Reasoning has no tags, in
// whatever tokens. The prompt ends with <|start|>assistant.
GrammarPart HarmonyAnswer(GrammarPart content, bool is_json, const SpecialTokenId& special);

// True for a template of this format.
bool IsHarmony(std::string_view chat_template);

}  // namespace spl::router
