//! Ranks that wait for one another are found at once, by a proof that none of them can ever go on.
//!
//! Messages between two ranks arrive in the order in which they were sent. So once a rank has heard from every other
//! one that it waits, all that these sent before has arrived; if nothing of it ended the wait, nothing will, unless
//! what arrived made a rank answer without its front. The ranks therefore say so several times over, in phases, and are
//! in a deadlock when all of them still wait as at the beginning.

use std::collections::BTreeMap;

use shardwright_core::Rank;

/// After how long without progress ranks begin to compare their waits, in seconds.
pub const QUIET_SECONDS: f64 = 1.0;
/// How often the ranks say that they wait: answers without the front may cause as many answers less one.
const PHASES: u32 = 4;

/// The ranks that take part in a collective, and which one of theirs it is.
pub type Collective = (Vec<Rank>, u64);

/// Names a wait: another one has another mark.
pub type WaitMark = (String, u64);

/// What a rank waits for and cannot get by itself.
#[derive(Clone, Debug)]
pub struct WaitStanding {
    /// What it waits for; `None` where it does anything else.
    pub mark: Option<WaitMark>,
    /// The collective that this is for: it ends once all that take part have begun it, without a message.
    pub collective: Option<Collective>,
    /// How many collectives this rank has begun, by group.
    pub begun: Vec<Collective>,
    /// Since when it has looked in vain: all that had arrived by then was no help.
    pub looked: f64,
    /// For how many seconds nothing has happened, as far as it knows.
    pub seconds: f64,
}

/// What a rank announces to all others.
#[derive(Clone, Debug)]
pub struct Announcement {
    /// The number of the suspicion.
    pub round: u64,
    /// How often it has said so.
    pub phase: u32,
    /// What it does, in words.
    pub text: String,
    /// See [`WaitStanding::collective`].
    pub collective: Option<Collective>,
    /// See [`WaitStanding::begun`].
    pub begun: Vec<Collective>,
}

/// One rank's part in the proof.
#[derive(Debug)]
pub struct DeadlockProof {
    rank: Rank,
    round: u64,
    phase: u32,
    mark: Option<WaitMark>,
    /// By rank, the round and phase that it announced last.
    heard: BTreeMap<Rank, (u64, u32)>,
    said: BTreeMap<Rank, Announcement>,
    complete_since: Option<f64>,
    proof: Option<String>,
}

impl DeadlockProof {
    /// No rank is suspected.
    pub fn new(rank: Rank, others: impl IntoIterator<Item = Rank>) -> Self {
        Self {
            rank,
            round: 0,
            phase: 0,
            mark: None,
            heard: others.into_iter().map(|other| (other, (0, 0))).collect(),
            said: BTreeMap::new(),
            complete_since: None,
            proof: None,
        }
    }

    /// The number of the suspicion; that of a proof is the same on all ranks.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// The wait that is suspected here.
    pub fn mark(&self) -> Option<&WaitMark> {
        self.mark.as_ref()
    }

    /// What all ranks wait for, once it is proven that they do so for ever.
    pub fn proof(&self) -> Option<&str> {
        self.proof.as_deref()
    }

    /// Forgets the suspicion of that number, which has been proven here or on another rank.
    pub fn begin_anew(&mut self, ended: u64) {
        self.round = self.round.max(ended);
        (self.proof, self.mark, self.complete_since) = (None, None, None);
        self.phase = 0;
        self.said.clear();
    }

    /// Another rank has announced a phase.
    pub fn hear(&mut self, rank: Rank, message: Announcement) {
        self.heard.insert(rank, (message.round, message.phase));
        self.said.insert(rank, message);
    }

    /// Goes on with the proof; called again and again. The phase that this rank now has to [`announce`](Self::announce).
    pub fn look(&mut self, standing: &WaitStanding, now: f64) -> Option<u32> {
        if self.proof.is_some() {
            return None;
        }
        let newest = self.heard.values().map(|heard| heard.0).max().unwrap_or(0);
        if standing.mark.is_none() || standing.mark != self.mark {
            self.mark = None; // this rank went on, or goes on
        }
        if self.mark.is_none() {
            if standing.mark.is_some() && (newest > self.round || standing.seconds >= QUIET_SECONDS)
            {
                self.mark.clone_from(&standing.mark);
                self.round = newest.max(self.round + 1);
                return Some(1);
            }
            return None;
        }
        if newest > self.round {
            self.round = newest;
            return Some(1);
        }
        if self
            .heard
            .values()
            .any(|heard| *heard < (self.round, self.phase))
        {
            return None;
        }
        let since = *self.complete_since.get_or_insert(now);
        if standing.looked <= since {
            return None;
        }
        if self.phase < PHASES {
            return Some(self.phase + 1);
        }
        if self.said.values().all(|said| self.is_for_ever(said)) {
            let texts: Vec<&str> = self.said.values().map(|said| said.text.as_str()).collect();
            self.proof = Some(texts.join("\n"));
        }
        None
    }

    /// A phase begins: what is sent to all others.
    pub fn announce(&mut self, phase: u32, standing: &WaitStanding, text: String) -> Announcement {
        self.phase = phase;
        self.complete_since = None;
        let said = Announcement {
            round: self.round,
            phase,
            text,
            collective: standing.collective.clone(),
            begun: standing.begun.clone(),
        };
        self.said.insert(self.rank, said.clone());
        said
    }

    /// Whether somebody who takes part in the collective that a rank waits for has not begun it.
    fn is_for_ever(&self, said: &Announcement) -> bool {
        let Some((ranks, number)) = &said.collective else {
            return true;
        };
        let begun = ranks.iter().filter_map(|rank| self.said.get(rank));
        begun
            .flat_map(|said| &said.begun)
            .any(|(group, begun)| group == ranks && number > begun)
    }
}
