//! What a schedule would idle if nothing but the schedule cost time.

use crate::policy::Schedule;

impl Schedule {
    /// The part of a step in which a rank idles, where all ranks cost the same and messages cost nothing.
    ///
    /// Of `p` ranks with `m` microbatches simple and interleaved fill and drain the pipeline once: `(p - 1) / (m + p - 1)`
    /// (Huang et al., 2019; Narayanan et al., 2021). `None` where there is no closed form: fewer microbatches may be
    /// active than there are ranks to keep busy, it depends on how many parts a rank has, backwards are split, so that
    /// it depends on what the parts cost, or the order is a user's own.
    pub fn ideal_bubble(&self, num_ranks: u32, num_microbatches: u32) -> Option<f64> {
        let waits = num_ranks.saturating_sub(1);
        let (rules, active) = self.rules();
        let fills = num_ranks <= 1
            || !matches!(self, Self::List(_) | Self::Program(_))
                && rules.fills_once(num_ranks.min(num_microbatches), active);
        fills.then(|| f64::from(waits) / f64::from((num_microbatches + waits).max(1)))
    }
}
