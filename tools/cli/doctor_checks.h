// Turns the facts of `splice doctor` into findings.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/cli/doctor_facts.h"

namespace spl::cli {

enum class DoctorLevel {
  kFine,
  kAdvice,  // works, but slower or with less monitoring than possible
  kWrong,   // must be changed
};

struct DoctorFinding {
  std::string check;  // stable, for scripts: "driver", "gpu 0", "port 127.0.0.1:8000"
  DoctorLevel level = DoctorLevel::kFine;
  std::string value;   // the fact
  std::string should;  // the wanted value; empty: fine
  std::string change;  // the command or setting that changes it; empty: fine
};

// Judges the facts; a pure function. Findings are in the order in which a reader should work through them.
std::vector<DoctorFinding> JudgeDoctorFacts(const DoctorFacts& facts, const DoctorOptions& options);

// True if something must be changed.
bool AnyWrong(const std::vector<DoctorFinding>& findings);

// A table for people.
std::string DoctorTable(const std::vector<DoctorFinding>& findings);
// {"ok", "findings": [{"check", "level": "fine", "advice" or "wrong", "value", "should", "change"}]}
nlohmann::json DoctorJson(const std::vector<DoctorFinding>& findings);

}  // namespace spl::cli
