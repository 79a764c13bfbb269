// An OpenTelemetry collector for tests: takes OTLP over HTTP in JSON, and keeps the spans.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

namespace spl::testing {

// One connection at a time, on a thread of its own.
class OtlpCollector {
 public:
  struct ReceivedSpan {
    std::string program, instance;  // of the resource
    std::string trace_id, span_id, parent_id, name, state;
    int kind = 0;
    int64_t start_ns = 0, end_ns = 0;
    std::map<std::string, nlohmann::json> attributes;  // the values as encoded
    nlohmann::json status;
  };

  OtlpCollector();
  ~OtlpCollector();

  std::string endpoint() const;  // http://127.0.0.1:PORT
  // Of answers from now on: 200 takes the spans, others do not. 0: reads the request and never answers.
  void AnswerWith(int status) { status_ = status; }

  std::vector<ReceivedSpan> spans() const;
  // Of one trace.
  std::vector<ReceivedSpan> spans(const std::string& trace_id) const;
  int num_calls() const { return num_calls_; }
  // What was wrong with requests, if anything was.
  std::string problems() const;

 private:
  void Loop();
  void Serve(boost::asio::ip::tcp::socket& socket);
  void Keep(const std::string& body);

  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_;
  std::atomic<int> status_{200};
  std::atomic<int> num_calls_{0};
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;  // guards the two below
  std::vector<ReceivedSpan> spans_;
  std::string problems_;
  std::vector<boost::asio::ip::tcp::socket> unanswered_;  // the thread's
  std::thread thread_;
};

}  // namespace spl::testing
