// The judgement of `splice doctor`: from facts to findings.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/cli/doctor_facts.h"

namespace spl::cli {

enum class DoctorLevel {
  kFine,
  kAdvice,  // works, but slower or less well watched than it could
  kWrong,   // must be changed
};

struct DoctorFinding {
  std::string check;  // stable, for scripts: "driver", "gpu 0", "port 127.0.0.1:8000"
  DoctorLevel level = DoctorLevel::kFine;
  std::string value;   // what was found
  std::string should;  // what it should be; empty when fine
  std::string change;  // the command or setting that changes it; empty when fine
};

// Pure. In the order in which a reader should work through them.
std::vector<DoctorFinding> JudgeDoctorFacts(const DoctorFacts& facts, const DoctorOptions& options);

// Whether something must be changed.
bool AnyWrong(const std::vector<DoctorFinding>& findings);

// A table for people.
std::string DoctorTable(const std::vector<DoctorFinding>& findings);
// {"ok", "findings": [{"check", "level": "fine", "advice" or "wrong", "value", "should", "change"}]}
nlohmann::json DoctorJson(const std::vector<DoctorFinding>& findings);

}  // namespace spl::cli
