// What this program is: version, source and what is compiled in.
#pragma once

#include <string>

// "muGPT 0.1.0 (git 0123abcd), cpu backend, ..."
std::string version_text();

// The git commit this was built from, "-dirty" appended where the tree had changes; "unknown" outside git.
std::string git_commit();
