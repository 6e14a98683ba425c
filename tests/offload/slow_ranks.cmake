# Cases of the suites of ranks that are slow where ranks are connected otherwise than by copies from each other's memory: all but
# a tenth, which has policies, sums, speculation, saving, plans and each way to fail.
set(slow_ranks * !RanksAbsent.* !AdoptByRanks.IsRefusedToAllWhereOneHasNoRoom !FailingRank.ByAnExceptionOfTheCallers*
    !FailingRank.ByAnEngineThatCannotBeMade !StalledRank.* !PlansOfRanks.AreRefusedToAllWhereTheyDiffer
    !SavingRanks.WhereTheDiskIsFull* !SavingRanks.AScope* [[!*RanksOfEveryPolicy.GiveTheBitsOfOne/"interleave:2,*]]
    [[!*RanksOfEveryPolicy.*BeforeTheNormIsKnown/"host"]] [[!*RanksOfEveryPolicy.AddUp*/"stream"]]
    [[!*RanksOfEveryPolicy.Skip*/"static:0.3"]] [[!*RanksOfEveryPolicy.Move*/"interleave:2,*]] [[!*StateOfRanks.TakesMoments*/"host"]]
    [[!*AdoptingRanks.*AccumulationAndEvaluations/0]] [[!*RanksWithAbsentGradients.*/"stream"]])
