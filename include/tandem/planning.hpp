#pragma once
// The performance model: plans chosen for a machine that was measured, and predicted steps. Beside tandem/tandem.hpp,
// for those who want more than a policy by name.
#include "api/calibrate.hpp"
#include "api/profile_cache.hpp"
#include "scheduler/auto.hpp"
#include "scheduler/cost_model.hpp"
#include "scheduler/profile.hpp"
#include "scheduler/simulator.hpp"
#include "tandem/tandem.hpp"
