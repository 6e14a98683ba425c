# Cases of the policies that are slow on some device, for a reason that holds on each. What remains runs updates by the CPU,
# streamed, and of residents beside both: the other policies have the same tasks in other places.
#   slow_policies        all that are not needed for that
#   slow_mixed_policies  of them those that mix what others do alone: `device` remains too
set(slow_mixed_policies "Policies/*EveryPolicy.*\"auto\"*" "Policies/*EngineArithmetic.*\"auto\"*")
set(slow_policies "")
foreach(suite EveryPolicy SkippedStep EngineArithmetic)
  foreach(policy static:* interleave:[0-9])
    list(APPEND slow_mixed_policies "Policies/*${suite}.*\"${policy}\"*")
  endforeach()
  list(APPEND slow_policies "Policies/*${suite}.*\"device\"*")
endforeach()
# Newer suites, which have residents beside updates by the CPU under static:0.5.
foreach(suite Fp32Weights OpenSteps AbsentGradients Decisions)
  list(APPEND slow_mixed_policies "Policies/*${suite}.*\"interleave:*")
  list(APPEND slow_policies "Policies/*${suite}.*\"device\"*")
endforeach()
foreach(suite Speculation LinkCodesUnder CodedWeightsUnder)
  list(APPEND slow_mixed_policies "Policies/${suite}.*/interleave_2*")
endforeach()
# Weights that are not trained are fetched alike wherever the others are updated.
list(APPEND slow_policies Policies/CodedWeightsUnder.*/host_*)
list(APPEND slow_policies ${slow_mixed_policies})
