// A fake cluster whose model answers with its prompt, made by a chat template of the test.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/temp_dir.h"
#include "tests/support/template_model.h"

namespace spl::testing {

struct NamedEvent {
  std::string name;
  nlohmann::json data;
};

struct EchoCluster : FakeCluster {
  const TempDir dir;

  EchoCluster() : FakeCluster(1, 1) { fabric.answers_once = true; }

  void Start(const std::string& chat_template) {
    MakeTemplateModel(dir, chat_template);
    options.model_dir = dir.path();
    options.served_model_name = "echo";
    StartRouter();
  }

  TestResponse Post(const std::string& path, const nlohmann::json& body, std::vector<std::string> headers = {}) {
    headers.emplace_back("content-type: application/json");
    return Call(http(), "POST", path, body.dump(), headers);
  }
  nlohmann::json Posted(const std::string& path, const nlohmann::json& body) {
    const TestResponse response = Post(path, body);
    EXPECT_EQ(response.status, 200) << response.body;
    return nlohmann::json::parse(response.body, nullptr, false);
  }
  // The events of a stream, of which each has a name.
  std::vector<NamedEvent> Events(const std::string& path, nlohmann::json body, std::vector<std::string> headers = {}) {
    body["stream"] = true;
    headers.emplace_back("content-type: application/json");
    HttpTestClient client(http());
    client.SendRequest("POST", path, body.dump(), headers);
    const TestResponse head = client.ReadHead();
    EXPECT_EQ(head.status, 200);
    std::vector<NamedEvent> events;
    while (const auto event = client.NextEvent()) {
      const size_t line = event->find('\n');
      EXPECT_EQ(event->substr(0, 7), "event: ") << *event;
      EXPECT_EQ(event->substr(line + 1, 6), "data: ") << *event;
      events.push_back({event->substr(7, line - 7), nlohmann::json::parse(event->substr(line + 7))});
    }
    return events;
  }
};

inline nlohmann::json ErrorOf(const TestResponse& response) {
  return nlohmann::json::parse(response.body, nullptr, false).value("error", nlohmann::json());
}

}  // namespace spl::testing
