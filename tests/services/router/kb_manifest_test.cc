// Manifests of knowledge bases: what is written is read, and nothing else is. And the packing of contexts.
#include "services/router/kb/kb_manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "services/router/kb/canonical_contexts.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

KbVersion Version(uint64_t number, KbState state) {
  return {.version = number,
          .state = state,
          .uid = "u" + std::to_string(number),
          .created_ms = 1'700'000'000'000,
          .heartbeat_ms = 1'700'000'000'001,
          .model_fingerprint = std::string(64, 'a'),
          .documents = 2,
          .tokens = 90,
          .contexts = 1,
          .chunks = 3,
          .bytes = 4096,
          .prefill_seconds = 0.5,
          .error = state == KbState::kFailed ? "no \"room\"" : ""};
}

KbHead Head() {
  return {.name = "ships",
          .durable = false,
          .current = 3,
          .history = {1, 2},
          .next_version = 5,
          .change = "c",
          .versions = {Version(1, KbState::kReady), Version(2, KbState::kReady), Version(3, KbState::kReady),
                       Version(4, KbState::kFailed)}};
}

KbContent Content() {
  KbContent content{.uid = "u1", .instruction = "Answer from the documents.\n", .documents = {}};
  for (const char* text : {"Ship 12 carries tea.", "Schiff Nr. 63 \u2013 Salz \U0001F6A2\n"}) {
    content.documents.push_back({.id = "d" + std::to_string(content.documents.size()),
                                 .text = text,
                                 .sha256 = Sha256Hex(text),
                                 .tokens = 7,
                                 .context = content.documents.size()});
  }
  return content;
}

TEST(KbManifest, ReadsWhatItWrites) {
  const KbHead head = ParseKbHead(ToJson(Head())).value();
  EXPECT_EQ(ToJson(head), ToJson(Head()));
  EXPECT_EQ(head.versions[3].error, "no \"room\"");
  EXPECT_THAT(head.history, ElementsAre(1, 2));
  const KbContent content = ParseKbContent(ToJson(Content())).value();
  EXPECT_EQ(ToJson(content), ToJson(Content()));
  EXPECT_EQ(content.documents[1].text, Content().documents[1].text);
}

TEST(KbManifest, DamagedOnesAreDataLoss) {
  const nlohmann::json head = nlohmann::json::parse(ToJson(Head()));
  const auto with = [&](const std::string& path, const nlohmann::json& value) {
    nlohmann::json changed = head;
    changed[nlohmann::json::json_pointer(path)] = value;
    return changed.dump();
  };
  nlohmann::json without = head;
  without.erase("history");
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), std::string("{}"), without.dump(),
        with("/current", 4),  // failed
        with("/current", 9), with("/current", -1), with("/history/0", 4), with("/history/0", "1"),
        with("/next_version", 4), with("/versions/1/version", 1), with("/versions/0/state", "new"),
        with("/versions/0/model_fingerprint", "abc"), with("/versions/0/bytes", 1.5), with("/name", nullptr),
        with("/surplus", 1), with("/format", "1")}) {
    EXPECT_EQ(ParseKbHead(text).status().code(), absl::StatusCode::kDataLoss) << text;
  }
  EXPECT_EQ(ParseKbHead(with("/format", 2)).status().code(), absl::StatusCode::kFailedPrecondition);

  KbContent changed = Content();
  changed.documents[0].text = "Ship 12 carries gold.";
  EXPECT_THAT(ParseKbContent(ToJson(changed)).status().ToString(), HasSubstr("d0"));
  EXPECT_EQ(ParseKbContent(ToJson(changed)).status().code(), absl::StatusCode::kDataLoss);
  KbContent twice = Content();
  twice.documents[1].id = "d0";
  EXPECT_EQ(ParseKbContent(ToJson(twice)).status().code(), absl::StatusCode::kDataLoss);
}

// Any cut, and any byte changed, gives a status and no crash; what is still accepted keeps its promises.
TEST(KbManifest, SurvivesRandomDamage) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::string head = ToJson(Head()), content = ToJson(Content());
  for (int i = 0; i < 2000; ++i) {
    std::string text = i % 2 == 0 ? head : content;
    if (i % 3 == 0) text.resize(random() % text.size());
    if (!text.empty()) text[random() % text.size()] = static_cast<char>(random());
    const auto parsed = ParseKbHead(text);
    if (parsed.ok() && parsed->current != 0) {
      ASSERT_NE(parsed->Find(parsed->current), nullptr);
    }
    const auto documents = ParseKbContent(text);
    for (const KbDocument& d : documents.ok() ? documents->documents : std::vector<KbDocument>()) {
      ASSERT_EQ(Sha256Hex(d.text), d.sha256);
    }
  }
}

TEST(KbManifest, Names) {
  for (const char* name : {"a", "ships-2.v_1", "..a"}) EXPECT_TRUE(CheckKbName(name).ok()) << name;
  EXPECT_TRUE(CheckKbName(std::string(128, 'n')).ok());
  for (const char* name : {"", ".", "..", "a/b", "a b", "\xC3\xA4", "a\n"})
    EXPECT_FALSE(CheckKbName(name).ok()) << name;
  EXPECT_EQ(ParamOf(CheckKbName(std::string(129, 'n'))), "name");
}

TEST(KbManifest, HistoryOfWhatWasCurrent) {
  KbHead head{.name = "n"};
  for (uint64_t v = 1; v <= 3; ++v) {
    head.versions.push_back(Version(v, KbState::kReady));
    head.MakeCurrent(v);
  }
  EXPECT_THAT(head.history, ElementsAre(1, 2));
  head.MakeCurrent(1);
  EXPECT_THAT(head.history, ElementsAre(2, 3));
  head.MakeCurrent(1);
  EXPECT_THAT(head.history, ElementsAre(2, 3)) << "nothing has changed";
  head.Erase(2);
  EXPECT_THAT(head.history, ElementsAre(3));
  EXPECT_EQ(head.Find(2), nullptr);
}

TEST(KbManifest, DiffsByTextAndId) {
  KbContent from = Content(), to = Content();
  from.documents.push_back({.id = "gone", .text = "x", .sha256 = Sha256Hex("x")});
  to.documents[0].text = "Ship 12 carries gold.";
  to.documents[0].sha256 = Sha256Hex(to.documents[0].text);
  to.documents.push_back({.id = "new", .text = "x", .sha256 = Sha256Hex("x")});
  to.instruction += "!";
  const KbDiff diff = Diff(from, to);
  EXPECT_THAT(diff.added, ElementsAre("new"));
  EXPECT_THAT(diff.removed, ElementsAre("gone"));
  EXPECT_THAT(diff.changed, ElementsAre("d0"));
  EXPECT_EQ(diff.unchanged, 1u);
  EXPECT_TRUE(diff.instruction_changed);
}

TEST(KbManifest, Sha256OfAKnownText) {
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(SeparateContexts, OneForEachDocument) {
  EXPECT_THAT(SeparateContexts(3), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
  EXPECT_TRUE(SeparateContexts(0).empty());
}

TEST(PackContexts, KeepsTheOrderAndFillsUpToTheLimit) {
  const std::vector<uint64_t> lengths = {40, 50, 11, 90, 1, 90};
  EXPECT_THAT(PackContexts(lengths, 10, 100),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2), ElementsAre(3), ElementsAre(4), ElementsAre(5)));
  EXPECT_THAT(PackContexts(lengths, 0, 101), ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3, 4), ElementsAre(5)));
  EXPECT_TRUE(PackContexts({}, 10, 100).empty());
}

TEST(PackContexts, EveryDocumentOnceAndNoContextTooLong) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 100; ++round) {
    const uint64_t prefix = random() % 20, limit = prefix + 1 + random() % 200;
    std::vector<uint64_t> lengths(random() % 50);
    for (uint64_t& length : lengths) length = 1 + random() % (limit - prefix);
    size_t next = 0;
    for (const auto& context : PackContexts(lengths, prefix, limit)) {
      uint64_t used = prefix;
      ASSERT_FALSE(context.empty());
      for (const size_t i : context) {
        ASSERT_EQ(i, next++);
        used += lengths[i];
      }
      ASSERT_LE(used, limit);
    }
    ASSERT_EQ(next, lengths.size());
  }
}

}  // namespace
}  // namespace spl::router
