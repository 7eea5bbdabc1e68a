//! `DeadlockDetector`: one rank's part in the proof that ranks wait for one another.

use std::sync::Mutex;

use pyo3::prelude::*;
use shardwright_core::Rank;
use shardwright_runtime::{Announcement, DeadlockProof, WaitId, WaitState};

type Collective = (Vec<u32>, u64);
/// Round, phase, text, collective, and the collectives that were begun.
type AnnouncementParts = (u64, u32, String, Option<Collective>, Vec<Collective>);

/// One rank's part in the proof that ranks wait for one another, and none can ever go on.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct DeadlockDetector(Mutex<DeadlockProof>);

impl DeadlockDetector {
    fn lock(&self) -> std::sync::MutexGuard<'_, DeadlockProof> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[pymethods]
impl DeadlockDetector {
    #[new]
    fn new(rank: u32, others: Vec<u32>) -> Self {
        let others = others.into_iter().map(Rank);
        Self(Mutex::new(DeadlockProof::new(Rank(rank), others)))
    }

    /// The number of the suspicion; that of a proof is the same on all ranks.
    #[getter]
    fn round(&self) -> u64 {
        self.lock().round()
    }

    /// The wait that is suspected here.
    #[getter]
    fn wait_id(&self) -> Option<WaitId> {
        self.lock().wait_id().cloned()
    }

    /// What all ranks wait for, once it is proven that they do so for ever.
    #[getter]
    fn proof(&self) -> Option<String> {
        self.lock().proof().map(str::to_owned)
    }

    /// Forget the suspicion of that number, which has been proven here or on another rank.
    fn reset(&self, ended: u64) {
        self.lock().reset(ended);
    }

    /// Another rank has announced what `update` gave it.
    fn receive(&self, rank: u32, announced: AnnouncementParts) {
        let (round, phase, text, collective, begun) = announced;
        let message = Announcement {
            round,
            phase,
            text,
            collective: collective.map(numbered),
            begun: begun.into_iter().map(numbered).collect(),
        };
        self.lock().receive(Rank(rank), message);
    }

    /// Go on with the proof; called again and again. What this rank now announces to all others, in the words of
    /// `describe`; None where nothing.
    #[expect(clippy::too_many_arguments, reason = "a state, and the time")]
    fn update(
        &self,
        wait_id: Option<WaitId>,
        collective: Option<Collective>,
        begun: Vec<Collective>,
        last_checked: f64,
        seconds: f64,
        now: f64,
        describe: &Bound<'_, PyAny>,
    ) -> PyResult<Option<AnnouncementParts>> {
        let state = WaitState {
            wait_id,
            collective: collective.map(numbered),
            begun: begun.into_iter().map(numbered).collect(),
            last_checked,
            seconds,
        };
        let phase = self.lock().update(&state, now);
        let Some(phase) = phase else { return Ok(None) };
        // Not under the lock: another thread may ask for the wait_id meanwhile.
        let text = describe.call0()?.extract()?;
        let announced = self.lock().announce(phase, &state, text);
        let begun = announced.begun.into_iter().map(plain).collect();
        Ok(Some((
            announced.round,
            announced.phase,
            announced.text,
            announced.collective.map(plain),
            begun,
        )))
    }
}

fn numbered((ranks, number): Collective) -> shardwright_runtime::Collective {
    (ranks.into_iter().map(Rank).collect(), number)
}

fn plain((ranks, number): shardwright_runtime::Collective) -> Collective {
    (ranks.into_iter().map(|rank| rank.0).collect(), number)
}
