//! Verifying: all bytes, and what is wrong with any of them.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::chunks::read_chunks;
use crate::damage::Damage;
use crate::error::CheckpointError;
use crate::files::OpenFile;
use crate::hash::{CHUNK_BYTES, num_chunks};
use crate::part::{header_problem, headers};
use crate::read::Checkpoint;

/// How many chunks are verified before progress is told.
const VERIFIED_CHUNKS: usize = 16;
impl Checkpoint {
    /// Reads all files, and lists what is wrong with any. `progress` is told how many bytes have been read since it was
    /// told last.
    pub fn verify(&self, progress: impl FnMut(u64)) -> Result<Vec<Damage>, CheckpointError> {
        let damages = self.verify_files(progress);
        let damages = damages.map_err(|error| self.explained(error))?;
        if !damages.is_empty() && self.is_gone() {
            return Err(self.gone());
        }
        Ok(damages)
    }

    fn verify_files(&self, mut progress: impl FnMut(u64)) -> Result<Vec<Damage>, CheckpointError> {
        let mut damages = self.damaged_files()?;
        let mut expected = headers(self.manifest());
        let unreadable: BTreeSet<String> = damages
            .iter()
            .map(|damage| damage.file().to_owned())
            .collect();
        for (number, file) in self.manifest().files.iter().enumerate() {
            if unreadable.contains(&file.name) {
                continue;
            }
            let before = damages.len();
            let opened = self.open_file(number)?;
            let all = num_chunks(file.bytes);
            for begin in (0..all).step_by(VERIFIED_CHUNKS) {
                let batch = begin..(begin + VERIFIED_CHUNKS as u64).min(all);
                let nothing_of = batch.clone().map(|chunk| ((number, chunk), Vec::new()));
                match read_chunks(self, nothing_of.collect()) {
                    Err(CheckpointError::Damaged { .. }) => {
                        damages.extend(self.damaged_chunks(&opened, number, batch.clone())?);
                    }
                    other => other?,
                }
                progress(self.range(number, batch.end - 1).end - self.range(number, begin).start);
            }
            if damages.len() > before {
                continue; // the header's bytes may be among those that have changed
            }
            let mut header = vec![0; file.data_begin as usize];
            self.read_at(&opened, number, 0, &mut header)?;
            if let Some(problem) = header_problem(&header, std::mem::take(&mut expected[number])) {
                damages.push(Damage::Header {
                    file: file.name.clone(),
                    problem,
                });
            }
        }
        Ok(damages)
    }

    /// What is wrong with some chunks of a file.
    fn damaged_chunks(
        &self,
        file: &OpenFile,
        number: usize,
        chunks: Range<u64>,
    ) -> Result<Vec<Damage>, CheckpointError> {
        let mut damages = Vec::new();
        let mut memory = vec![0; CHUNK_BYTES as usize];
        for chunk in chunks {
            let range = self.range(number, chunk);
            let into = &mut memory[..(range.end - range.start) as usize];
            match self.read_chunk(file, number, chunk, into) {
                Err(CheckpointError::Damaged { damages: found, .. }) => damages.extend(found),
                other => other?,
            }
        }
        Ok(damages)
    }
}
