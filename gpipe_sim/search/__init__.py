"""The fastest plans that fit. The words of this package, with three layers a, b, c on two devices as the example:

    cut         which layers each stage holds              a | b c     or    a b | c
    interval    the layers between two borders             a, b, c, ab, bc, abc
    mode        what a stage recomputes                    never, except_last or always, one for each stage
    setup       everything of a plan but cut and modes     K = 2, M = 4, 1f1b, window 2, on ranks 0 and 1
    estimate    about how long a cut takes in a setup      chain + slack of the slowest stage
    bound       what no plan of a setup can beat           proven, so that a setup above the best plan is left out
    candidate   a plan with the evaluator's figures        2.31 s, 5.2 GB: only these are compared and recommended
    question    the fastest plan within so many bytes      one for the device's memory, others for the front

With forwards of 1, 2 and 3 s, backwards twice as long and 1 s per message, one micro-batch needs the *chain*

    a | b c     1 + 1 + 5 + 10 + 1 + 2 = 20 s              a b | c     3 + 1 + 3 + 6 + 1 + 6 = 20 s

and each of the M - 1 others adds what the slowest stage takes for it: 15 s, or 9 s. So a b | c is estimated at
20 + 3 * 9 = 47 s for M = 4, and is what the evaluator is asked about first.

    choices    what a scenario leaves open        improve    neighbours of a plan, while they are better
    setups     every setup, every placement       exact      branch and bound, where a setup is small enough
    order      what a schedule's order implies    searcher   what a search knows of its space
    tables     what an interval costs             question   one answer, in four steps
    cuts       estimates, cuts and bounds         nearest    a proof that nothing fits, or what comes nearest
    rough      the same for all setups at once    search     the questions that lead to the answer and the front
    judge      the evaluator, work counted        advise     one recommendation, why, how sure, what would change it
    beyond     interleaved and split schedules    joint      stages, replicas and tensor groups at once
    other_schedules   a plan under each         replan     a plan for another number of devices
"""
