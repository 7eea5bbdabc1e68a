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

/// Identifies a wait.
pub type WaitId = (String, u64);

/// What a rank waits for and cannot get by itself.
#[derive(Clone, Debug)]
pub struct WaitState {
    /// What it waits for; `None` where it does anything else.
    pub wait_id: Option<WaitId>,
    /// The collective that this is for: it ends once all that take part have begun it, without a message.
    pub collective: Option<Collective>,
    /// How many collectives this rank has begun, by group.
    pub begun: Vec<Collective>,
    /// When the last check began that did not end the wait, in seconds.
    pub last_checked: f64,
    /// For how many seconds nothing has happened, as far as it knows.
    pub seconds: f64,
}

/// What a rank announces to all others.
#[derive(Clone, Debug)]
pub struct Announcement {
    /// The number of the suspicion.
    pub round: u64,
    /// How often it has announced so.
    pub phase: u32,
    /// What it does, in words.
    pub text: String,
    /// See [`WaitState::collective`].
    pub collective: Option<Collective>,
    /// See [`WaitState::begun`].
    pub begun: Vec<Collective>,
}

/// One rank's part in the proof.
#[derive(Debug)]
pub struct DeadlockProof {
    rank: Rank,
    round: u64,
    phase: u32,
    wait_id: Option<WaitId>,
    /// By rank, the round and phase that it announced last.
    heard: BTreeMap<Rank, (u64, u32)>,
    announced: BTreeMap<Rank, Announcement>,
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
            wait_id: None,
            heard: others.into_iter().map(|other| (other, (0, 0))).collect(),
            announced: BTreeMap::new(),
            complete_since: None,
            proof: None,
        }
    }

    /// The number of the suspicion; that of a proof is the same on all ranks.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// The wait that is suspected here.
    pub fn wait_id(&self) -> Option<&WaitId> {
        self.wait_id.as_ref()
    }

    /// What all ranks wait for, once it is proven that they do so for ever.
    pub fn proof(&self) -> Option<&str> {
        self.proof.as_deref()
    }

    /// Forgets the suspicion of that number, which has been proven here or on another rank.
    pub fn reset(&mut self, ended: u64) {
        self.round = self.round.max(ended);
        (self.proof, self.wait_id, self.complete_since) = (None, None, None);
        self.phase = 0;
        self.announced.clear();
    }

    /// Another rank has announced a phase.
    pub fn receive(&mut self, rank: Rank, message: Announcement) {
        self.heard.insert(rank, (message.round, message.phase));
        self.announced.insert(rank, message);
    }

    /// Goes on with the proof; called again and again. The phase that this rank now has to [`announce`](Self::announce).
    pub fn update(&mut self, state: &WaitState, now: f64) -> Option<u32> {
        if self.proof.is_some() {
            return None;
        }
        let newest = self.heard.values().map(|heard| heard.0).max().unwrap_or(0);
        if state.wait_id.is_none() || state.wait_id != self.wait_id {
            self.wait_id = None; // this rank went on, or goes on
        }
        if self.wait_id.is_none() {
            if state.wait_id.is_some() && (newest > self.round || state.seconds >= QUIET_SECONDS) {
                self.wait_id.clone_from(&state.wait_id);
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
        if state.last_checked <= since {
            return None;
        }
        if self.phase < PHASES {
            return Some(self.phase + 1);
        }
        if self
            .announced
            .values()
            .all(|announced| self.is_for_ever(announced))
        {
            let texts: Vec<&str> = self
                .announced
                .values()
                .map(|announced| announced.text.as_str())
                .collect();
            self.proof = Some(texts.join("\n"));
        }
        None
    }

    /// A phase begins: what is sent to all others.
    pub fn announce(&mut self, phase: u32, state: &WaitState, text: String) -> Announcement {
        self.phase = phase;
        self.complete_since = None;
        let announced = Announcement {
            round: self.round,
            phase,
            text,
            collective: state.collective.clone(),
            begun: state.begun.clone(),
        };
        self.announced.insert(self.rank, announced.clone());
        announced
    }

    /// Whether somebody who takes part in the collective that a rank waits for has not begun it.
    fn is_for_ever(&self, announced: &Announcement) -> bool {
        let Some((ranks, number)) = &announced.collective else {
            return true;
        };
        let begun = ranks.iter().filter_map(|rank| self.announced.get(rank));
        begun
            .flat_map(|announced| &announced.begun)
            .any(|(group, begun)| group == ranks && number > begun)
    }
}
