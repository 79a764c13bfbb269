// `splice chat` as a person uses it: the real program at a terminal of its own, against a router over fake workers,
// which answer with the prompt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "services/tokenizer/tokenizer.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/pty_process.h"
#include "tests/support/temp_dir.h"

namespace spl::cli {
namespace {

using test::PtyProcess;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kUp[] = "\x1b[A", kLeft[] = "\x1b[D", kCtrlC[] = "\x03", kCtrlD[] = "\x04";

#ifdef SPLICE_HAVE_LIBEDIT
constexpr bool kEditsLines = true;
#else
constexpr bool kEditsLines = false;
#endif

class ChatTest : public ::testing::Test {
 protected:
  ChatTest() : cluster_(1, 1) { cluster_.fabric.answers_once = true; }

  void Start() { cluster_.StartRouter(); }

  std::vector<std::string> Argv(std::vector<std::string> more = {}) const {
    std::vector<std::string> argv = {SPLICE_PROGRAM, "chat", "--endpoint", "http://" + cluster_.http(), "--system", ""};
    argv.insert(argv.end(), more.begin(), more.end());
    return argv;
  }
  std::vector<std::string> Environment() const {
    return {"TERM=xterm", "LC_ALL=C", "HOME=" + dir_.path(), "XDG_STATE_HOME=" + dir_.path() + "/state",
            color_ ? "NO_COLOR=" : "NO_COLOR=1"};
  }
  // A chat that has greeted and waits for input.
  std::unique_ptr<PtyProcess> Chat(std::vector<std::string> more = {}, std::vector<std::string> variables = {}) const {
    auto environment = Environment();
    environment.insert(environment.end(), variables.begin(), variables.end());
    auto chat = std::make_unique<PtyProcess>(Argv(std::move(more)), environment);
    chat->WaitFor("splice-tiny");
    chat->WaitFor(prompt());
    return chat;
  }
  // Waits for the answer to the first message of a conversation, and for the next prompt. An answer repeats its prompt.
  void ExpectEcho(PtyProcess& chat, const std::string& message) const {
    if (chat.WaitFor("user\r\n" + message + "\r\nassistant") && chat.WaitFor("[TTFT ")) chat.WaitFor(prompt());
  }
  // Waits for the prompt: before it the terminal itself takes keys like Ctrl-R.
  void Clear(PtyProcess& chat) const {
    chat.Type("/clear\r");
    chat.WaitFor("forgotten");
    chat.WaitFor(prompt());
  }
  static void End(PtyProcess& chat) {
    chat.Type(kCtrlD);
    EXPECT_EQ(chat.WaitForExit(), 0);
  }
  std::string HistoryPath() const { return dir_.path() + "/state/splice/chat_history"; }

  // Bold where libedit draws it: a build without it prints the bare prompt.
  std::string prompt() const { return color_ && kEditsLines ? "\x1b[1m>\x1b[0m " : "> "; }

  testing::FakeCluster cluster_;
  testing::TempDir dir_;
  bool color_ = false;
};

// Three tokens that arrive together would be thousands a second.
TEST_F(ChatTest, AShortAnswerHasNoRate) {
  Start();
  auto chat = Chat();
  chat->Type("/set max_tokens 3\r");
  chat->WaitFor(prompt());
  chat->Type("Hello\r");
  chat->WaitFor("[TTFT ");
  chat->WaitFor(prompt());
  EXPECT_THAT(chat->output(), HasSubstr(" ms, 3 tokens, "));
  EXPECT_THAT(chat->output(), Not(HasSubstr("tokens/s")));
}

TEST_F(ChatTest, GreetsWithTheModelAndAnswers) {
  color_ = true;
  Start();
  auto chat = Chat();
  EXPECT_THAT(chat->output(), HasSubstr(cluster_.http()));
  EXPECT_THAT(chat->output(), HasSubstr("context 16384 tokens"));
  chat->Type("Hello\r");
  ExpectEcho(*chat, "Hello");
  EXPECT_THAT(chat->output(), HasSubstr("prompt tokens cached, exact/dense]"));
  EXPECT_THAT(chat->output(), HasSubstr(" tokens/s, "));
  EXPECT_THAT(chat->output(), HasSubstr("\x1b[2m[TTFT")) << "dim";
  EXPECT_THAT(chat->output(), HasSubstr(prompt())) << "bold, and what is typed is not";
  chat->Type("\r");  // an empty line is no message and does not end
  chat->WaitFor(prompt());
  End(*chat);
}

TEST_F(ChatTest, NoColor) {
  Start();
  auto chat = Chat();
  chat->Type("Hello\r");
  ExpectEcho(*chat, "Hello");
  End(*chat);
  EXPECT_THAT(chat->output(), Not(HasSubstr("\x1b[1m")));
  EXPECT_THAT(chat->output(), Not(HasSubstr("\x1b[2m")));
}

TEST_F(ChatTest, SaysThatNobodyIsThere) {
  const std::vector<std::string> argv = {SPLICE_PROGRAM, "chat", "--endpoint", "http://127.0.0.1:9"};
  PtyProcess chat(argv, Environment());
  EXPECT_EQ(chat.WaitForExit(), 1);
  EXPECT_THAT(chat.output(), HasSubstr("cannot connect to http://127.0.0.1:9"));
  EXPECT_THAT(chat.output(), Not(HasSubstr("/help"))) << "no greeting";
}

TEST_F(ChatTest, SpliceApiKeyIsSentToTheServer) {
  const std::string keys = dir_.path() + "/keys";
  std::ofstream(keys) << "key-of-a-tenant alice\n";
  cluster_.options.api_keys_file = keys;
  Start();
  PtyProcess refused(Argv(), Environment());
  EXPECT_EQ(refused.WaitForExit(), 1);
  EXPECT_THAT(refused.output(), HasSubstr("401"));
  End(*Chat({}, {"SPLICE_API_KEY=key-of-a-tenant"}));
}

TEST_F(ChatTest, SlashCommands) {
  Start();
  auto chat = Chat();
  chat->Type("/help\r");
  chat->WaitFor("/receipt");
  chat->Type("/receipt\r");
  chat->WaitFor("no answer");
  chat->Type("/set temperature 0.7\r/set seed 5\r/set reuse sparsex\r/set\r");
  chat->WaitFor("temperature 0.7, seed 5, max_tokens 512, reuse sparsex");
  chat->Type("/set reuse default\r/set top_p 7\r");
  chat->WaitFor("top_p must be a number from 0 to 1");
  chat->Type("/set tempreature 1\r");
  chat->WaitFor("there is no such setting");
  chat->Type("/sytsem x\r");
  chat->WaitFor("there is no such command");
  chat->Type("/system Be brief.\r");
  chat->WaitFor("is set");
  chat->Type("Hi\r");
  chat->WaitFor("system\r\nBe brief.\r\nuser\r\nHi\r\nassistant");
  chat->WaitFor(prompt());
  chat->Type("/receipt\r");
  chat->WaitFor("\"reuse\": \"exact\"");
  chat->WaitFor("\"seed\": 5");
  // A path is a message; without a system message again, and without the first turn.
  chat->Type("/system\r/clear\r/etc/hosts\r");
  chat->WaitFor("forgotten");
  ExpectEcho(*chat, "/etc/hosts");
  chat->Type("/set max_tokens 3\r/clear\rHello\r");
  chat->WaitFor("the answer ends at 3 tokens");
  chat->Type("/quit\r");
  EXPECT_EQ(chat->WaitForExit(), 0);
}

TEST_F(ChatTest, ErrorsOfTheServerAreShownAndTheMessageIsForgotten) {
  Start();
  auto chat = Chat();
  chat->Type("/set reuse nonsense\rLost\r");
  chat->WaitFor("splice.reuse");
  chat->Type("/set reuse default\rKept\r");
  ExpectEcho(*chat, "Kept");
  End(*chat);
}

TEST_F(ChatTest, SeveralLinesInQuotes) {
  Start();
  auto chat = Chat();
  chat->Type("\"\"\"\rfirst\r\rthird\"\"\"\r");
  ExpectEcho(*chat, "first\r\n\r\nthird");
  chat->Type("/clear\r\"\"\"one line\"\"\"\r");
  ExpectEcho(*chat, "one line");
  chat->Type(std::string("\"\"\"\rdropped\r") + kCtrlC);
  chat->WaitFor("once more");
  chat->Type("/clear\rkept\r");
  ExpectEcho(*chat, "kept");
  End(*chat);
}

TEST_F(ChatTest, CtrlCStopsAnAnswerAndNotTheProgram) {
  Start();
  cluster_.decode[0]->SetGate(3);
  auto chat = Chat();
  chat->Type("Hello\r");
  chat->WaitFor("user");
  chat->Type(kCtrlC);
  chat->WaitFor("[stopped]");
  EXPECT_TRUE(cluster_.decode[0]->WaitIdle()) << "the server stops, too";
  cluster_.decode[0]->SetGate(UINT32_MAX);
  chat->WaitFor(prompt());
  // Before the first token, too. The stopped message is not part of the conversation.
  cluster_.prefill[0]->Hold(true);
  chat->Type("/clear\rNever\r");
  chat->WaitFor("forgotten");
  ASSERT_TRUE(cluster_.prefill[0]->WaitFor([](const auto& counters) { return counters.waiting == 1; }));
  chat->Type(kCtrlC);
  chat->WaitFor("[stopped]");
  cluster_.prefill[0]->Hold(false);
  chat->WaitFor(prompt());
  chat->Type("Again\r");
  ExpectEcho(*chat, "Again");
  End(*chat);
}

TEST_F(ChatTest, CtrlCTwiceAtThePromptEnds) {
  Start();
  auto chat = Chat();
  chat->Type(kCtrlC);
  chat->WaitFor("once more");
  chat->WaitFor(prompt());
  chat->Type("Hello\r");
  ExpectEcho(*chat, "Hello");
  chat->Type(std::string("half a mess") + kCtrlC);
  chat->WaitFor("once more");
  chat->WaitFor(prompt());
  chat->Type(kCtrlC);
  EXPECT_EQ(chat->WaitForExit(), 0);
}

// The reader of builds without libedit.
TEST_F(ChatTest, WithoutEditing) {
  Start();
  auto environment = Environment();
  environment[0] = "TERM=dumb";
  PtyProcess chat(Argv(), environment);
  chat.WaitFor("splice-tiny");
  chat.WaitFor(prompt());
  chat.Type("Hello\n");
  ExpectEcho(chat, "Hello");
  chat.Type("/clear\n\"\"\"\na\nb\n\"\"\"\n");
  ExpectEcho(chat, "a\r\nb");
  chat.Type(kCtrlC);
  chat.WaitFor("once more");
  chat.WaitFor(prompt());
  chat.Type("/clear\nAgain\n");
  ExpectEcho(chat, "Again");
  chat.Type(kCtrlC);
  chat.WaitFor("once more");
  chat.WaitFor(prompt());
  chat.Type(kCtrlC);
  EXPECT_EQ(chat.WaitForExit(), 0);
  EXPECT_THAT(chat.output(), Not(HasSubstr("\x1b")));
  EXPECT_FALSE(std::filesystem::exists(HistoryPath()));
}

TEST_F(ChatTest, ReasoningIsDim) {
  color_ = true;
  cluster_.options.output_format.reasoning = "think";
  const auto tokenizer = tokenizer::Tokenizer::Load(testing::kTinyModel);
  ASSERT_TRUE(tokenizer.ok());
  const auto ids = (*tokenizer)->Encode("<think>Why not?</think>Yes.", {});
  ASSERT_TRUE(ids.ok());
  cluster_.fabric.answers_once = false;
  cluster_.fabric.answer_tokens = static_cast<uint32_t>(ids->size());
  cluster_.fabric.model = [ids = *ids](const auto&, uint32_t, uint32_t index) {
    return index < ids.size() ? static_cast<uint32_t>(ids[index]) : 4091;
  };
  Start();
  auto chat = Chat();
  chat->Type("Hello\r");
  chat->WaitFor("\x1b[2m");
  chat->WaitFor("[TTFT");
  chat->WaitFor(prompt());
  End(*chat);
  std::string text = chat->output();
  for (const std::string dim : {"\x1b[2m", "\x1b[0m"}) {
    for (size_t at = text.find(dim); at != std::string::npos; at = text.find(dim)) text.erase(at, dim.size());
  }
  EXPECT_THAT(text, HasSubstr("Why not?\r\n\r\nYes.\r\n"));
}

TEST_F(ChatTest, WithoutATerminalEveryLineIsAMessage) {
  Start();
  const std::string in = dir_.path() + "/in", out = dir_.path() + "/out", err = dir_.path() + "/err";
  const auto run = [&](const std::string& text) {
    std::ofstream(in) << text;
    std::string command = "HOME=" + dir_.path();
    for (const std::string& word : Argv()) command += " '" + word + "'";
    const int status = std::system((command + " <" + in + " >" + out + " 2>" + err).c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  };
  EXPECT_EQ(run("Hello\n\n/clear\n\"\"\"\ntwo\nlines\n\"\"\"\n/clear\nlast"), 0);
  EXPECT_EQ(read(out), "user\nHello\nassistant\n\nuser\ntwo\nlines\nassistant\n\nuser\nlast\nassistant\n\n");
  EXPECT_EQ(read(err), "");
  EXPECT_EQ(run("/set reuse nonsense\nHello\n/clear\nmore\n"), 1);
  EXPECT_THAT(read(err), HasSubstr("splice.reuse"));
  EXPECT_EQ(read(out), "") << "ends with the first error";
  EXPECT_EQ(run("\"\"\"\nopen"), 1);
  EXPECT_FALSE(std::filesystem::exists(HistoryPath()));
}

#ifdef SPLICE_HAVE_LIBEDIT

TEST_F(ChatTest, EditsLinesAndRecallsThemAlsoInTheNextRun) {
  Start();
  auto chat = Chat();
  chat->Type(std::string("Helo") + kLeft + "l\r");
  ExpectEcho(*chat, "Hello");
  Clear(*chat);
  chat->Type(std::string(kUp) + kUp + " again\r");
  ExpectEcho(*chat, "Hello again");
  End(*chat);
  struct stat file {};
  ASSERT_EQ(::stat(HistoryPath().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600U);
  chat = Chat();
  chat->Type(std::string(kUp) + "!\r");
  ExpectEcho(*chat, "Hello again!");
  Clear(*chat);
  chat->Type("\x12Hello a\r");  // Ctrl-R searches
  ExpectEcho(*chat, "Hello again!");
  End(*chat);
  chat = Chat({"--no-history"});
  chat->Type(std::string(kUp) + "nothing above\r");
  ExpectEcho(*chat, "nothing above");
  End(*chat);
  std::ifstream history(HistoryPath());
  const std::string text((std::istreambuf_iterator<char>(history)), std::istreambuf_iterator<char>());
  EXPECT_THAT(text, Not(HasSubstr("nothing above")));
}

TEST_F(ChatTest, LettersOfSeveralBytes) {
  Start();
  auto chat = Chat();
  chat->Type(
      "gr\xc3\xbc\xc3\x9f"
      "e\x7f"
      "en\r");  // the key removes the e
  ExpectEcho(*chat,
             "gr\xc3\xbc\xc3\x9f"
             "en");
  End(*chat);
}

TEST_F(ChatTest, APasteIsOneMessage) {
  Start();
  auto chat = Chat();
  chat->Type("\x1b[200~first\rsecond\r\x1b[201~");
  chat->WaitFor("second");
  chat->Type(" end\r");
  ExpectEcho(*chat, "first\r\nsecond end");
  Clear(*chat);
  chat->Type("a\x1b\rb\r");  // Alt-Enter
  ExpectEcho(*chat, "a\r\nb");
  Clear(*chat);
  chat->Type(std::string(kUp) + kUp + "\r");
  ExpectEcho(*chat, "a\r\nb");
  End(*chat);
}

#endif

}  // namespace
}  // namespace spl::cli
