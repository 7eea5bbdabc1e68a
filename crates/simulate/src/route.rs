//! The way of a microbatch through a chain of segments, as turns of ranks.

use std::time::Duration;

use shardwright_core::{PipelineRank, StageId};
use shardwright_schedule::ReadyKind;

use crate::error::SimulationError;

/// The rank whose step function calls the model.
pub(crate) const ROOT: PipelineRank = PipelineRank(0);

/// How control goes from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Always by way of the root, which asks each rank for its part, and for which it needs its
    /// own turn: a module that calls its children.
    Star,
    /// From one rank straight to the next. The root still starts forward and backward.
    Direct,
    /// As `Direct`, and the root asks for the backward as soon as it has done its own forwards, so that
    /// the last segment's rank begins it without the root: calls whose results are predicted.
    Predicted,
}

/// A model as a chain of segments: what one rank runs in one go.
///
/// Forward takes them in order, backward in reverse. Where two that follow one another are on the
/// same rank, it keeps the turn between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The ranks of the segments. The first is on rank 0, the root; the root may have more.
    pub segments: Vec<PipelineRank>,
    /// How control goes from rank to rank.
    pub control: Control,
    /// How long the root has the turn each time that it only hands control on.
    pub root_turn: Duration,
    /// How long the root has the turn between the last forward and the first backward.
    pub root_backward: Duration,
}

impl Chain {
    /// How many ranks it has.
    pub(crate) fn num_ranks(&self) -> Result<usize, SimulationError> {
        if self.segments.first() != Some(&ROOT) {
            return Err(SimulationError::NotFromRoot {
                segments: self.segments.iter().map(|rank| rank.0).collect(),
            });
        }
        let mut ranks = self.segments.clone();
        ranks.sort_unstable();
        ranks.dedup();
        let highest = *ranks.last().expect("the root is among them");
        let gap = (0_u32..)
            .map(PipelineRank)
            .zip(&ranks)
            .find(|(expected, rank)| expected != *rank);
        match gap {
            None => Ok(ranks.len()),
            Some((rank, _)) => Err(SimulationError::RankWithoutSegment { rank, highest }),
        }
    }
}

/// Something that a rank does without giving up the turn in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TurnPart {
    Forward(StageId),
    Backward(StageId),
    /// The root hands control on to a segment.
    Turn(StageId, Duration),
}

/// A turn of a rank for a microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Visit {
    pub(crate) rank: PipelineRank,
    /// As what it is ready.
    pub(crate) kind: ReadyKind,
    pub(crate) pieces: Vec<TurnPart>,
}

/// The way of every microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MicrobatchPath {
    /// Its turns, in order.
    pub(crate) visits: Vec<Visit>,
    /// Where the root asks for the backward beforehand.
    pub(crate) ahead: Option<Ahead>,
}

/// The root asks for a backward that begins on another rank, while the forward may still be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// After this turn, its last one of the forward, the root may ask.
    pub(crate) after: usize,
    /// This turn needs the root's word besides the turn before it.
    pub(crate) backward: usize,
}

/// The turns that every microbatch needs, in order.
pub(crate) fn route(chain: &Chain) -> MicrobatchPath {
    let mut visits = vec![visit(ROOT, ReadyKind::RootForward)];
    let last = StageId(chain.segments.len() as u32 - 1);
    for (stage, rank) in stages(chain) {
        go_to(&mut visits, chain, rank, stage, false);
        push(&mut visits, TurnPart::Forward(stage));
    }
    let mut ahead = None;
    if chain.control == Control::Predicted && current(&visits) != ROOT {
        let of_root = visits.iter().rposition(|visit| visit.rank == ROOT);
        ahead = of_root.map(|after| Ahead {
            after,
            backward: visits.len(),
        });
        visits.push(visit(current(&visits), ReadyKind::RequestBackward));
    } else {
        if current(&visits) != ROOT {
            visits.push(visit(ROOT, ReadyKind::ResumeForward));
            push(&mut visits, TurnPart::Turn(last, chain.root_turn));
        }
        visits.push(visit(ROOT, ReadyKind::RootBackward));
        push(&mut visits, TurnPart::Turn(last, chain.root_backward));
    }
    for (stage, rank) in stages(chain).rev() {
        go_to(&mut visits, chain, rank, stage, true);
        push(&mut visits, TurnPart::Backward(stage));
    }
    MicrobatchPath { visits, ahead }
}

fn stages(
    chain: &Chain,
) -> impl DoubleEndedIterator<Item = (StageId, PipelineRank)> + ExactSizeIterator {
    let segments = chain.segments.iter().enumerate();
    segments.map(|(index, rank)| (StageId(index as u32), *rank))
}

fn visit(rank: PipelineRank, kind: ReadyKind) -> Visit {
    Visit {
        rank,
        kind,
        pieces: Vec::new(),
    }
}

fn current(visits: &[Visit]) -> PipelineRank {
    visits.last().expect("a route begins with a turn").rank
}

fn push(visits: &mut [Visit], piece: TurnPart) {
    let last = visits.last_mut().expect("a route begins with a turn");
    last.pieces.push(piece);
}

fn go_to(visits: &mut Vec<Visit>, chain: &Chain, rank: PipelineRank, stage: StageId, back: bool) {
    let (resume, request) = if back {
        (ReadyKind::ResumeBackward, ReadyKind::RequestBackward)
    } else {
        (ReadyKind::ResumeForward, ReadyKind::RequestForward)
    };
    let from = current(visits);
    if from == rank {
        return;
    }
    if chain.control == Control::Star && from != ROOT && rank != ROOT {
        visits.push(visit(ROOT, resume));
        push(visits, TurnPart::Turn(stage, chain.root_turn));
    }
    visits.push(visit(rank, if rank == ROOT { resume } else { request }));
}
