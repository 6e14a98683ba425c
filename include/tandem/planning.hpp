#pragma once
// The performance model: plans chosen for a machine that was measured, and predicted steps. Beside tandem/tandem.hpp,
// for those who want more than a policy by name.
#include "api/calibrate.hpp"
#include "api/profile_cache.hpp"
#include "scheduler/machine/cost_model.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/search/auto.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "tandem/tandem.hpp"
