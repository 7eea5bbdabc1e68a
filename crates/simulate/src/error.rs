//! What cannot be simulated.

use shardwright_core::PipelineRank;
use shardwright_schedule::ProgramError;

/// What cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulationError {
    /// The program cannot be run.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The costs are not those of the stages.
    #[error("costs of {given} stages are given; allowed are costs of all {needed} stages")]
    StageCosts {
        /// Of how many stages.
        given: usize,
        /// How many there are.
        needed: usize,
    },
    /// The costs are not those of the microbatches.
    #[error(
        "costs of {given} microbatches are given; allowed are costs of all {needed} microbatches"
    )]
    MicrobatchCosts {
        /// Of how many microbatches.
        given: usize,
        /// How many there are.
        needed: usize,
    },
    /// The latencies are not those between the ranks.
    #[error("latencies of {given} ranks are given; allowed are those between all {needed} ranks")]
    Latencies {
        /// Of how many ranks.
        given: usize,
        /// How many there are.
        needed: usize,
    },
    /// The chain does not begin at the root.
    #[error("the segments are on ranks {segments:?}; the first one has to be on rank 0, the root")]
    NotFromRoot {
        /// The ranks of the segments.
        segments: Vec<u32>,
    },
    /// A rank has nothing to do.
    #[error(
        "no segment is on rank {rank}; allowed are segments on all ranks from 0 to {highest}, the highest that \
         occurs"
    )]
    RankWithoutSegment {
        /// The rank.
        rank: PipelineRank,
        /// The highest rank of a segment.
        highest: PipelineRank,
    },
    /// A program where a policy is needed.
    #[error("a program was given as a policy; allowed are policies, and a program as --program")]
    ProgramAsPolicy,
    /// A list for another number of microbatches.
    #[error(
        "the list has {entries} entries, but the step {num_microbatches} microbatches; allowed are two entries for each"
    )]
    ListLength {
        /// How many entries it has.
        entries: usize,
        /// How many microbatches the step has.
        num_microbatches: u32,
    },
}
