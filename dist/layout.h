// Which rank owns which block.
#pragma once

#include "optim/optimizer.h"
#include "optim/ownership.h"

// Owners of the table's blocks for `ranks` ranks, as `rank` sees them; every rank finds the same. Muon's
// matrices are shared out by the work of Newton-Schulz, small side squared times large side; then all other
// blocks by bytes: each, largest first, goes to the rank that has the least (longest processing time first,
// Graham 1969). GPT-2's matrices divide evenly over 2, 4 and 8 ranks. Ranks beyond the number of blocks own
// nothing.
Ownership assign_owners(const ParameterTable& table, OptimizerKind kind, int ranks, int rank);
