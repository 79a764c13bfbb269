// Chat templates against jinja2: whole templates in the style of the supported families, and single constructs.
#include "services/tokenizer/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <thread>

#include "services/base/status.h"
#include "tests/services/tokenizer/test_files.h"

namespace spl::tokenizer {
namespace {

using json = nlohmann::ordered_json;  // the order of members matters to tojson and to loops
using testing::HasSubstr;

// With `arguments_as_text` the arguments of calls are their JSON text, as clients of OpenAI's API send them.
std::vector<ChatMessage> MessagesOf(const json& list, bool arguments_as_text = false) {
  std::vector<ChatMessage> messages;
  for (json item : list) {
    ChatMessage message{item["role"].get<std::string>(), std::nullopt};
    if (!item["content"].is_null()) message.content = item["content"].get<std::string>();
    item.erase("role");
    item.erase("content");
    for (json& call : item.value("tool_calls", json()).is_array() && arguments_as_text ? item["tool_calls"] : json())
      call["function"]["arguments"] = call["function"]["arguments"].dump();
    if (!item.empty()) message.extra_json = item.dump();
    messages.push_back(std::move(message));
  }
  return messages;
}

// The result must be what jinja2 gave: the same text, or an error; of raise_exception the same message.
void ExpectGolden(const absl::StatusOr<std::string>& rendered, const json& golden) {
  if (golden.contains("rendered")) {
    ASSERT_TRUE(rendered.ok()) << rendered.status();
    EXPECT_EQ(*rendered, golden["rendered"].get<std::string>());
    return;
  }
  ASSERT_FALSE(rendered.ok()) << *rendered;
  EXPECT_EQ(rendered.status().code(), absl::StatusCode::kInvalidArgument);
  if (!golden.contains("raised")) return;
  EXPECT_EQ(MessageOf(rendered.status()), golden["error"].get<std::string>());
}

absl::StatusOr<std::string> RenderSource(const std::string& source, const std::string& variables = "") {
  auto parsed = ChatTemplate::Parse(source, "<s>", "</s>");
  if (!parsed.ok()) return parsed.status();
  return (*parsed)->Render({}, {.add_generation_prompt = true, .extra_json = variables});
}

TEST(ChatTemplateTest, FamiliesRenderAsJinja) {
  const auto lines = ReadJsonLines(std::string(kTestdata) + "/chat.jsonl");
  ASSERT_GE(lines.size(), 300u);
  for (const json& line : lines) {
    const auto name = line["template"].get<std::string>();
    SCOPED_TRACE(name + " " + line["messages"].dump() + " " + line["extra"].dump());
    const auto parsed = ChatTemplate::Parse(ReadTestFile(std::string(kTestdata) + "/templates/" + name), "<s>", "</s>");
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const RenderOptions options{line["add_generation_prompt"].get<bool>(), line["extra"].dump()};
    ExpectGolden((*parsed)->Render(MessagesOf(line["messages"]), options), line);
    ExpectGolden((*parsed)->Render(MessagesOf(line["messages"], true), options), line);
  }
}

TEST(ChatTemplateTest, SnippetsRenderAsJinja) {
  const auto lines = ReadJsonLines(std::string(kTestdata) + "/snippets.jsonl");
  ASSERT_GE(lines.size(), 60u);
  const std::string variables = lines[0]["variables"].dump();
  for (size_t i = 1; i < lines.size(); ++i) {
    SCOPED_TRACE(lines[i]["source"].get<std::string>());
    ExpectGolden(RenderSource(lines[i]["source"].get<std::string>(), variables), lines[i]);
  }
}

TEST(ChatTemplateTest, SharedGoldens) {
  if (SharedDir().empty()) GTEST_SKIP() << "no ../shared and no SPLICE_SHARED_DIR";
  const auto loaded = ChatTemplate::Load(kTinyModel);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const auto lines = ReadJsonLines(SharedDir() + "/golden/chat_template.jsonl");
  ASSERT_GE(lines.size(), 10u);
  for (const json& line : lines) {
    const auto rendered =
        (*loaded)->Render(MessagesOf(line["messages"]), {line["add_generation_prompt"].get<bool>(), ""});
    ASSERT_TRUE(rendered.ok()) << rendered.status();
    EXPECT_EQ(*rendered, line["rendered"].get<std::string>());
  }
}

TEST(ChatTemplateTest, UnsupportedConstructsAreNamedAtParse) {
  const std::pair<const char*, const char*> cases[] = {
      {"a\n{% include 'x' %}", "line 2: the tag 'include' is not supported"},
      {"\n\n{{ x | groupby('a') }}", "line 3: the filter 'groupby' is not supported"},
      {"{{ x is escaped }}", "line 1: the test 'escaped' is not supported"},
      {"{{ x.encode(1) }}", "line 1: the method 'encode' is not supported"},
      {"{{ cycler(1) }}", "line 1: the function 'cycler' is not supported"},
      {"{% for x in y recursive %}{% endfor %}", "recursive loops are not supported"},
      {"{{ f(*a) }}", "argument unpacking is not supported"},
      {"{{ x | map('groupby') }}", "the filter 'groupby' is not supported"},
      {"{{ x | selectattr('a', 'escaped') }}", "the test 'escaped' is not supported"},
      {"{% macro m() %}{{ caller() }}{% endmacro %}", "'caller' is not supported"},
      {"{% call m() %}{% endcall %}", "the tag 'call' is not supported"},
      {"{% with a=1 %}{% endwith %}", "the tag 'with' is not supported"},
      {"{{ 0x10 }}", "numbers other than decimal"},
      {"{{ x.upper()() }}", "calling this expression is not supported"},
      {"{% if x %}", "expected {% endif %}, found the end of the template"},
      {"{% endif %}", "'endif' closes nothing"},
      {"{{ x", "the tag is not closed with }}"},
      {"{{ 'x }}", "the string is not closed"},
      {"{# x", "the comment is not closed"},
      {"{% raw %}", "the raw block is not closed"},
      {"{{ x ! y }}", "unexpected character '!'"},
      {"{{ x y }}", "expected '}}', found 'y'"},
      {"{{ (1 }}", "unexpected"},
      {"{{ }}", "expected an expression"},
      {"{{ 99999999999999999999 }}", "too large"},
      {"{{ '\\uD800' }}", "names no character"},
      {"{% break %}", "outside of a loop"},
      {"{% for a in b %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}", "outside of a loop"},
      {"{% set true = 1 %}", "cannot be assigned to"},
      {"{% set x %}", "expected {% endset %}"},
      {"{% for x y %}", "expected 'in'"},
      {"\xFF", "is not UTF-8 at byte 0"},
  };
  for (const auto& [source, message] : cases) {
    const auto parsed = ChatTemplate::Parse(source, "", "");
    ASSERT_FALSE(parsed.ok()) << source;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(MessageOf(parsed.status()), HasSubstr(message)) << source;
  }
}

TEST(ChatTemplateTest, NestingIsBounded) {
  const auto repeat = [](const std::string& text, int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += text;
    return out;
  };
  for (const std::string& source :
       {"{{ " + repeat("(", 10000) + "1" + repeat(")", 10000) + " }}", "{{ 1" + repeat("+1", 10000) + " }}",
        "{{ " + repeat("-", 10000) + "1 }}", "{{ " + repeat("not ", 10000) + "1 }}",
        "{{ x" + repeat(".y", 10000) + " }}", "{{ x" + repeat("|trim", 10000) + " }}",
        repeat("{% if 1 %}", 10000) + repeat("{% endif %}", 10000),
        "{{ " + repeat("[", 10000) + repeat("]", 10000) + " }}", "{{ " + repeat("1 if 1 else ", 10000) + "1 }}"}) {
    EXPECT_FALSE(ChatTemplate::Parse(source, "", "").ok()) << source.substr(0, 20);
  }
}

TEST(ChatTemplateTest, RunningIsBounded) {
  for (const char* source : {
           "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
           "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
           "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
           "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}",
           "{% set ns = namespace() %}{% set ns.x = ns %}",
           "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
           "{{ 'a' * 99999999999 }}",
           "{{ 9223372036854775807 + 1 }}",
           "{{ 10 ** 100 }}",
           "{{ -(-9223372036854775807 - 1) }}",
           "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
       }) {
    const auto rendered = RenderSource(source);
    ASSERT_FALSE(rendered.ok()) << source;
    EXPECT_EQ(rendered.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(MessageOf(rendered.status()), HasSubstr("line 1")) << source;
  }
}

// A few bytes of template that read much, though they make little: without a charge for what is read, each of these
// takes between seconds and longer than anyone can wait.
TEST(ChatTemplateTest, ReadingIsBounded) {
  const std::string shared_lists =
      "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
  const std::string long_text = "{% set s = 'a' * 60000000 %}{% for i in range(99999) %}";
  for (const std::string& source : {
           shared_lists + "{{ ns.x | tojson }}",
           shared_lists + "{{ ns.x }}",
           shared_lists + "{{ ns.x ~ '' }}",
           shared_lists + "{{ ns.x | string | length }}",
           shared_lists + "{{ ns.x | join }}",
           shared_lists + "{{ ns.x | map('string') | list }}",
           shared_lists + "{{ ns.x == ns.x }}",
           shared_lists + "{{ ns.x is eq(ns.x) }}",
           shared_lists + "{{ ns.x < ns.x }}",
           shared_lists + "{{ 2 in ns.x }}",
           shared_lists + "{{ 'a'.join(ns.x) }}",
           shared_lists + "{{ raise_exception(ns.x) }}",
           long_text + "{% if s | length %}{% endif %}{% endfor %}",
           long_text + "{% if 'b' in s %}{% endif %}{% endfor %}",
           long_text + "{% if s == s %}{% endif %}{% endfor %}",
           long_text + "{% if s is upper %}{% endif %}{% endfor %}",
           long_text + "{% if s[9] %}{% endif %}{% endfor %}",
           long_text + "{% if s[:9] %}{% endif %}{% endfor %}",
           long_text + "{% if s.find('b') %}{% endif %}{% endfor %}",
           std::string(
               "{% set s = range(9999) | list %}{% for i in range(999) %}{% if s | unique %}{% endif %}{% endfor %}"),
           std::string("{% set s = range(99999) | list %}{% for i in range(9999) %}{% for j in s %}{% break %}{% "
                       "endfor %}{% endfor %}"),
       }) {
    const auto rendered = RenderSource(source);
    ASSERT_FALSE(rendered.ok()) << source;
    EXPECT_THAT(MessageOf(rendered.status()), HasSubstr("runs too long")) << source;
  }
  for (const char* source : {
           "{{ ('a' * 60000000) | list }}",
           "{{ ('a' * 60000000)[::2] }}",
           "{{ ('a' * 60000000).split('a') }}",
           "{{ ('a ' * 30000000).split() }}",
           "{{ ('\n' * 60000000).splitlines() }}",
       }) {
    EXPECT_EQ(RenderSource(source).status().code(), absl::StatusCode::kInvalidArgument) << source;
  }
}

// The cost of text operations grows with their input, not with its square: the quadratic ones took minutes here.
TEST(ChatTemplateTest, TextOperationsAreLinear) {
  EXPECT_EQ(*RenderSource("{{ ('a' * 2000000 + 'b') in 'a' * 4000000 }}"), "False");
  EXPECT_EQ(*RenderSource("{{ ('a' * 4000000).count('a' * 2000000 + 'b') }}"), "0");
  EXPECT_EQ(*RenderSource("{{ ('a' * 4000000).rsplit('b' + 'a' * 2000000, 1) | length }}"), "1");
  EXPECT_EQ(*RenderSource("{{ ('a ' * 900000).split() | length }}"), "900000");
  EXPECT_EQ(*RenderSource("{{ ('b' * 1000000).strip('a' * 1000000 + 'b') | length }}"), "0");
}

TEST(ChatTemplateTest, LongConversationsAreWithinTheBounds) {
  std::vector<ChatMessage> messages;
  for (int i = 0; i < 2000; ++i) messages.push_back({i % 2 == 0 ? "user" : "assistant", std::string(2000, 'x')});
  for (const char* name : {"qwen3.jinja", "qwen25.jinja", "llama31.jinja"}) {
    const std::string source = ReadTestFile(std::string(kTestdata) + "/templates/" + name);
    const auto parsed = ChatTemplate::Parse(source, "<s>", "</s>");
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const auto rendered = (*parsed)->Render(messages, {});
    ASSERT_TRUE(rendered.ok()) << name << ": " << rendered.status();
    EXPECT_GT(rendered->size(), 4'000'000u);
  }
}

TEST(ChatTemplateTest, SplittingAsInPython) {
  EXPECT_EQ(*RenderSource("{{ ' a  b c '.split() }}{{ ' a  b c '.split(none, 1) }}{{ '  '.split() }}"),
            "['a', 'b', 'c']['a', 'b c '][]");
  EXPECT_EQ(*RenderSource("{{ 'a--b---c'.rsplit('--', 1) }}{{ 'aaa'.rsplit('aa', 5) }}{{ 'é日é'.rsplit('日', 1) }}"),
            "['a--b-', 'c']['a', '']['é', 'é']");
  EXPECT_EQ(*RenderSource("{{ 'é日'|first }}{{ 'é日'|last }}{{ '\u00a0é\u2028' | list }}"),
            "é日['\\xa0', 'é', '\\u2028']");
  EXPECT_EQ(*RenderSource("{{ 'xéyéx'.strip('éx') }}"), "y");
}

TEST(ChatTemplateTest, DictsWithManyKeys) {
  std::string json = "{\"d\": {";
  for (int i = 0; i < 100; ++i) json += fmt::format("{}\"k{}\": {}", i > 0 ? ", " : "", i, i);
  json += "}}";
  EXPECT_EQ(*RenderSource("{{ d.k3 }} {{ d['k99'] }} {{ d.k100 is defined }} {{ 'k15' in d }} {{ dict(d, k3=5).k3 }} "
                          "{{ (d.keys() | list)[16] }}",
                          json),
            "3 99 False True 5 k16");
}

TEST(ChatTemplateTest, VariablesOfACall) {
  EXPECT_EQ(*RenderSource("{{ tools is none }}{{ documents is none }}{{ bos_token }}{{ eos_token }}"),
            "TrueTrue<s></s>");
  EXPECT_EQ(*RenderSource("{{ tools[0].z }}{{ bos_token }}", R"({"tools": [{"z": 1}], "bos_token": "B"})"), "1B");
  for (const char* json :
       {"[1]", "{", "{\"messages\": []}", "{\"add_generation_prompt\": true}", "{\"a\": 1e999999}"}) {
    EXPECT_FALSE(RenderSource("x", json).ok()) << json;
  }
  const auto parsed = ChatTemplate::Parse("{{ bos_token is defined }}{{ messages[0].content }}", "", "");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*(*parsed)->Render({{"user", "{{ x }}"}}, {}), "False{{ x }}");
  EXPECT_FALSE((*parsed)->Render({{"user", "\xFF"}}, {}).ok());
}

// Members of messages: everything is there for the template, and what is not there is not.
TEST(ChatTemplateTest, MembersOfMessages) {
  const auto parsed = ChatTemplate::Parse(
      "{% for m in messages %}{{ m.role }}:{{ m.content is none }}:{{ m.name }}:{{ m.x.y }}:{{ 'tool_calls' in m }};"
      "{% endfor %}",
      "", "");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*(*parsed)->Render({{"developer", "a", R"({"name": "n", "x": {"y": [1]}})"},
                                {"assistant", std::nullopt, R"({"tool_calls": [], "x": {}})"}},
                               {}),
            "system:False:n:[1]:False;assistant:True:::True;");
  EXPECT_EQ(*ChatTemplate::Parse("[{{ messages[0].content }}]", "", "").value()->Render({{"user", std::nullopt}}, {}),
            "[]");
  for (const char* extra : {"[]", "{", R"({"role": "system"})", R"({"content": "x"})", "{\"a\": \"\xFF\"}"})
    EXPECT_FALSE((*parsed)->Render({{"user", "a", extra}}, {}).ok()) << extra;
  const auto names_it = ChatTemplate::Parse("{# developer #}{{ messages[0].role }}", "", "");
  EXPECT_EQ(*(*names_it)->Render({{"developer", "a"}}, {}), "developer");
}

// Arguments are objects to a template that can take them, whatever the client sent, and texts to one that cannot.
TEST(ChatTemplateTest, ArgumentsOfCalls) {
  const std::string loop = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}";
  const auto render = [&](const std::string& use, const std::string& arguments) {
    const auto parsed = ChatTemplate::Parse(loop + use + "{% endfor %}{% endfor %}", "", "");
    const std::string call = R"({"tool_calls": [{"function": {"name": "f", "arguments": )" + arguments + "}}]}";
    return (*parsed)->Render({{"assistant", std::nullopt, call}}, {}).value_or("error");
  };
  for (const char* arguments : {R"({"b": 1, "a": "x"})", R"("{\"b\": 1, \"a\": \"x\"}")"}) {
    EXPECT_EQ(render("{{ c.function.arguments | tojson }}", arguments), R"(f{"b": 1, "a": "x"})") << arguments;
    EXPECT_EQ(render("{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}", arguments), "fb1ax");
    EXPECT_EQ(render("{{ '[' + c.function.arguments + ']' }}", arguments), R"(f[{"b": 1, "a": "x"}])") << arguments;
  }
  EXPECT_EQ(render("{{ c.function.arguments }}", R"("no object")"), "fno object");
}

TEST(ChatTemplateTest, ToolsThatAreNotThere) {
  EXPECT_EQ(*RenderSource("{{ tools is none }}"), "True");
  EXPECT_EQ(*RenderSource("{% if tools is defined %}{{ tools | length }}{% else %}none{% endif %}"), "none");
  EXPECT_EQ(*RenderSource("{% if tools is defined %}{{ tools | length }}{% endif %}", R"({"tools": [1]})"), "1");
}

TEST(ChatTemplateTest, TheFinalMessageIsContinued) {
  const RenderOptions options{.add_generation_prompt = false, .extra_json = "", .continue_final_message = true};
  const auto render = [&](const std::string& source, const std::vector<ChatMessage>& messages) {
    return ChatTemplate::Parse(source, "", "").value()->Render(messages, options);
  };
  const std::string plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}";
  const std::string trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}";
  const std::vector<ChatMessage> messages = {{"user", "same "}, {"assistant", "same "}};
  EXPECT_EQ(*render(plain, messages), "<user>same </s>\n<assistant>same ");
  EXPECT_EQ(*render(trims, messages), "<user>same</s>\n<assistant>same");
  EXPECT_EQ(*render(plain, {{"assistant", ""}}), "<assistant>");
  EXPECT_FALSE(render("{{ messages[0].content }}", messages).ok());
  EXPECT_FALSE(render(plain, {{"assistant", std::nullopt}}).ok());
  EXPECT_FALSE(render(plain, {}).ok());
}

TEST(ChatTemplateTest, ListsGrow) {
  EXPECT_EQ(*RenderSource("{% set l = [1] %}{% for i in [2, 3] %}{% set _ = l.append(i) %}{% endfor %}{{ l }}"),
            "[1, 2, 3]");
  EXPECT_EQ(*RenderSource("{% set ns = namespace(l=[]) %}{{ ns.l.append('a') }}{{ ns.l.append(['b']) }}{{ ns.l }}"),
            "NoneNone['a', ['b']]");
  EXPECT_EQ(*RenderSource("{% set ns = namespace(l=[1, 2, 3, 4]) %}{{ ns.l.pop(0) }}{{ ns.l.pop() }}{{ ns.l.pop(-2) }}"
                          "{{ ns.l }}"),
            "142[3]");
  for (const char* source : {
           "{% set a = [1] %}{% set b = a %}{% set _ = a.append(2) %}",  // b would have to see it
           "{% set a = [1] %}{% set _ = a.append(a) %}",
           "{% set a = [1] %}{% set _ = a.append([a]) %}",
           "{% set a = 'x' %}{% set _ = a.append('y') %}",
           "{% set _ = [1].append(2) %}",
           "{% set _ = none_such.append(2) %}",
           "{% set a = [] %}{% set _ = a.append() %}",
           "{% set a = [] %}{% set _ = a.pop() %}",
           "{% set a = [1] %}{% set _ = a.pop(1) %}",
           "{% set a = [1] %}{% set b = a %}{% set _ = a.pop() %}",
           "{% set a = [1] %}{% set _ = a.pop('x') %}",
       }) {
    EXPECT_EQ(RenderSource(source).status().code(), absl::StatusCode::kInvalidArgument) << source;
  }
  const auto endless = RenderSource(
      "{% set a = [] %}{% for i in range(99999) %}{% for j in range(99999) %}{% set _ = a.append(i) %}{% endfor %}"
      "{% endfor %}");
  EXPECT_FALSE(endless.ok());
}

TEST(ChatTemplateTest, NamespacesInLists) {
  EXPECT_EQ(*RenderSource("{% set a = namespace(x=1) %}{% set l = [a, {'k': a}] %}{% set a.x = 2 %}{{ l[0].x }}"
                          "{{ l[1].k.x }}"),
            "22");
  for (const char* source : {
           "{% set a = namespace() %}{% set a.x = [a] %}",
           "{% set a = namespace() %}{% set b = namespace(x=[a]) %}",
           "{% set a = namespace(l=[]) %}{% set _ = a.l.append(namespace()) %}",
           "{% set a = namespace() %}{{ [a] | tojson }}",
       }) {
    EXPECT_EQ(RenderSource(source).status().code(), absl::StatusCode::kInvalidArgument) << source;
  }
}

// An object with many members, as a client may send it, is read in a time that grows with it.
TEST(ChatTemplateTest, WideObjectsAreReadInLinearTime) {
  std::string json = "{\"d\": {";
  for (int i = 0; i < 300'000; ++i) json += fmt::format("{}\"k{}\": 1", i > 0 ? "," : "", i);
  EXPECT_EQ(*RenderSource("{{ d.k299999 }}", json + "}}"), "1");
}

TEST(ChatTemplateTest, ThreadsShareOneTemplate) {
  const auto parsed = ChatTemplate::Parse(ReadTestFile(std::string(kTestdata) + "/templates/qwen3.jinja"), "", "</s>");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const std::vector<ChatMessage> messages = {
      {"user", "q"}, {"assistant", "<think>\nhm\n</think>\n\na"}, {"user", "q2"}};
  const std::string expected = (*parsed)->Render(messages, {}).value();
  std::vector<int> num_equal(4, 0);
  std::vector<std::thread> threads;
  for (int& count : num_equal) {
    threads.emplace_back([&parsed, &messages, &expected, &count] {
      for (int i = 0; i < 50; ++i) count += (*parsed)->Render(messages, {}).value_or("") == expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_equal, std::vector<int>(4, 50));
}

TEST(ChatTemplateTest, CaseOfOtherAlphabetsIsRefusedNotGuessed) {
  EXPECT_EQ(*RenderSource("{{ 'ab 日本 🙂'.upper() }}"), "AB 日本 🙂");
  for (const char* source : {"{{ 'straße'.upper() }}", "{{ 'É' | lower }}", "{{ 'ж' | title }}"}) {
    EXPECT_FALSE(RenderSource(source).ok()) << source;
  }
}

TEST(ChatTemplateTest, DateOfToday) {
  const std::time_t before = std::time(nullptr);
  const auto rendered = RenderSource("{{ strftime_now('%d %b %Y') }}");
  const std::time_t after = std::time(nullptr);
  ASSERT_TRUE(rendered.ok()) << rendered.status();
  std::vector<std::string> expected;
  for (const std::time_t now : {before, after}) {
    char text[64];
    std::strftime(text, sizeof(text), "%d %b %Y", std::localtime(&now));
    expected.push_back(text);
  }
  EXPECT_THAT(expected, testing::Contains(*rendered));
}

class ChatTemplateFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  void Write(const std::string& name, const std::string& text) { std::ofstream(dir_ / name, std::ios::binary) << text; }
  std::string RenderLoaded() {
    const auto loaded = ChatTemplate::Load(dir_.string());
    if (!loaded.ok()) return "error: " + MessageOf(loaded.status());
    return (*loaded)->Render({{"user", "hi"}}, {}).value_or("no");
  }
  std::filesystem::path dir_;
};

TEST_F(ChatTemplateFilesTest, WhereTheTemplateComesFrom) {
  EXPECT_EQ(ChatTemplate::Load(dir_.string()).status().code(), absl::StatusCode::kNotFound);
  Write("tokenizer_config.json", R"({"bos_token": null})");
  EXPECT_EQ(ChatTemplate::Load(dir_.string()).status().code(), absl::StatusCode::kNotFound);
  Write("tokenizer_config.json", R"({"bos_token": {"content": "<B>"}, "pad_token": "<P>",
                                     "chat_template": "{{ bos_token }}{{ pad_token }}{{ eos_token }}"})");
  EXPECT_EQ(RenderLoaded(), "<B><P>");
  Write("tokenizer_config.json", R"({"chat_template": [{"name": "tool_use", "template": "T"},
                                                       {"name": "default", "template": "D"}]})");
  EXPECT_EQ(RenderLoaded(), "D");
  Write("chat_template.jinja", "J{{ messages[0].role }}\n");
  EXPECT_EQ(RenderLoaded(), "Juser");
}

TEST_F(ChatTemplateFilesTest, BadFilesNameThemselves) {
  Write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "T"}]})");
  EXPECT_THAT(RenderLoaded(), HasSubstr("no template named \"default\""));
  Write("tokenizer_config.json", R"({"chat_template": 5})");
  EXPECT_THAT(RenderLoaded(), HasSubstr("tokenizer_config.json: chat_template: must be a string"));
  Write("tokenizer_config.json", R"({"chat_template": "{% extends 'x' %}"})");
  EXPECT_THAT(RenderLoaded(),
              HasSubstr("tokenizer_config.json: chat template: line 1: the tag 'extends' is not supported"));
  Write("tokenizer_config.json", "{");
  EXPECT_THAT(RenderLoaded(), HasSubstr("tokenizer_config.json: is not JSON"));
  Write("tokenizer_config.json", R"({"bos_token": 7, "chat_template": "x"})");
  EXPECT_THAT(RenderLoaded(), HasSubstr("bos_token: must be"));
}

}  // namespace
}  // namespace spl::tokenizer
