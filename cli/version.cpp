// See version.h. The Makefile rewrites build/git_commit.h when the commit changes, and says which backend it
// is.
#include "cli/version.h"

#include "build/git_commit.h"

// Clang's version text has its name, GCC's does not.
#ifdef __clang__
#define MUGPT_COMPILER __VERSION__
#else
#define MUGPT_COMPILER "GCC " __VERSION__
#endif

// What a CUDA program has of NCCL, which the Makefile looks for: without it there is one rank.
#ifdef MUGPT_HAVE_NCCL
#define MUGPT_NCCL " with NCCL"
#else
#define MUGPT_NCCL " without NCCL, one process"
#endif

std::string git_commit() { return MUGPT_GIT_COMMIT; }

std::string version_text() {
    const std::string backend = MUGPT_BACKEND;
    return "muGPT 0.1.0 (git " + git_commit() + "), " + backend + " backend" +
           (backend == "cuda" ? MUGPT_NCCL : "") + "; built with " MUGPT_COMPILER;
}
