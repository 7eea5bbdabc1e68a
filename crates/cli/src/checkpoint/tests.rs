use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use shardwright_checkpoint::{
    Degrees, Description, Directory, Dtype, PieceView, Placement, Region, commit, write_part,
};

use crate::{Finished, PythonFacts, run};

/// A directory of checkpoints that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let name = format!("shardwright-cli-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// Saves a weight of four rows, divided among so many files by rows, and a scalar.
    fn save(&self, tag: &str, step: u64, files: u64, weight: [u8; 8]) {
        let directory = Directory::new(&self.0).unwrap();
        let rows = 4 / files;
        let parts = (0..files).map(|file| {
            let mut pieces = vec![PieceView {
                name: "model/weight",
                dtype: Dtype::U8,
                shape: &[4, 2],
                region: Region::boxed(vec![file * rows, 0], vec![rows, 2]),
                bytes: &weight[(2 * rows * file) as usize..][..(2 * rows) as usize],
            }];
            if file == 0 {
                pieces.push(PieceView {
                    name: "optimizer/step",
                    dtype: Dtype::F32,
                    shape: &[],
                    region: Region::whole(&[]),
                    bytes: &[0, 0, 0, 0],
                });
            }
            let name = format!("part-{file}.safetensors");
            write_part(&directory, tag, &name, &pieces).unwrap()
        });
        let description = Description {
            library_version: "0.1.0".to_owned(),
            step: Some(step),
            degrees: Degrees {
                pipeline: u32::try_from(files).unwrap().try_into().unwrap(),
                ..Degrees::ONE
            },
            partition: vec![Placement {
                module: "model".to_owned(),
                pp_rank: u32::try_from(files).unwrap() - 1,
            }],
            aliases: Vec::new(),
            user_content: json!({"epoch": step, "name": "x"}),
        };
        commit(&directory, tag, description, parts.collect(), None).unwrap();
    }

    fn run(&self, verb: &str, further: &[&str]) -> Finished {
        let path = self.0.to_str().unwrap();
        let words = [&["checkpoint", verb, path], further].concat();
        run(words, &PythonFacts::default(), None)
    }

    fn json(&self, verb: &str, further: &[&str]) -> Value {
        let finished = self.run(verb, &[further, &["--json"]].concat());
        serde_json::from_str(&finished.output).unwrap()
    }

    fn folder(&self, tag: &str) -> PathBuf {
        Directory::new(&self.0).unwrap().folder(tag)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

const WEIGHT: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

#[test]
fn checkpoints_are_listed_the_oldest_first() {
    let scratch = Scratch::new("list");
    scratch.save("b", 10, 1, WEIGHT);
    scratch.save("a", 20, 2, WEIGHT);
    write_part(&Directory::new(&scratch.0).unwrap(), "c", "part", &[]).unwrap();
    let finished = scratch.run("ls", &[]);
    assert_eq!((finished.status, &*finished.complaint), (0, ""));
    let words: Vec<Vec<&str>> = finished
        .output
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(words[1][..7], ["b", "complete", "10", "1", "x", "1", "x"]);
    assert_eq!(words[2][..5], ["*", "a", "complete", "20", "2"]);
    assert_eq!(words[3], ["c", "incomplete"]);
    let listed = scratch.json("ls", &[]);
    assert_eq!(listed["newest"], "a");
    assert_eq!(listed["checkpoints"][1]["tensors"], 2);
    fs::write(scratch.folder("b").join("manifest.json"), "{}").unwrap();
    let finished = scratch.run("ls", &[]);
    assert_eq!(finished.status, 1);
    assert!(finished.output.contains("b: "), "{}", finished.output);
}

#[test]
fn a_checkpoint_is_shown_with_its_tensors_and_files() {
    let scratch = Scratch::new("show");
    scratch.save("a", 10, 1, WEIGHT);
    scratch.save("b", 20, 2, WEIGHT);
    let shown = scratch.run("show", &[]).output;
    for expected in [
        "checkpoint b, step 20, number 1 of its directory, written by shardwright 0.1.0\n",
        "pp x tp x rdp: 2 x 1 x 1\n",
        "model/weight    U8     [4, 2]   8 B       2      2\n",
        "optimizer/step  F32    []       4 B       1      1\n",
        "modules: 1 on pp_rank 1\n",
        "user content: epoch, name\n",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in\n{shown}");
    }
    assert_eq!(scratch.json("show", &["a"])["step"], 10);
    let finished = scratch.run("show", &["c"]);
    assert_eq!(finished.status, 2);
    assert!(
        finished.complaint.ends_with("; there are a, b\n"),
        "{}",
        finished.complaint
    );
}

#[test]
fn damage_is_a_finding_and_named() {
    let scratch = Scratch::new("verify");
    scratch.save("a", 10, 2, WEIGHT);
    let well = scratch.run("verify", &[]);
    assert_eq!(well.status, 0);
    assert!(
        well.output.starts_with("checkpoint a: 2 files with "),
        "{}",
        well.output
    );
    let path = scratch.folder("a").join("part-1.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    fs::remove_file(scratch.folder("a").join("part-0.safetensors")).unwrap();
    let found = scratch.run("verify", &["a"]);
    assert_eq!(found.status, 1);
    let expected = format!(
        "bytes 0 to {} of part-1.safetensors have changed\n",
        bytes.len()
    );
    assert!(found.output.contains(&expected), "{}", found.output);
    assert!(
        found.output.contains("part-0.safetensors is missing\n"),
        "{}",
        found.output
    );
    assert_eq!(
        scratch.json("verify", &[])["damages"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let shown = scratch.run("show", &[]);
    assert_eq!((shown.status, &*shown.output), (1, ""));
}

#[test]
fn a_checkpoint_is_resharded_exported_and_imported_again() {
    let scratch = Scratch::new("conversions");
    scratch.save("a", 10, 2, WEIGHT);
    scratch.save("b", 20, 1, [9; 8]);
    let at = |name: &str| {
        let path = scratch.0.with_extension(name);
        path.to_str().unwrap().to_owned()
    };
    let (others, full, back) = (at("others"), at("full"), at("back"));
    let run = |words: &[&str]| run(words.iter().copied(), &PythonFacts::default(), None);
    let resharded = scratch.run("reshard", &["--tag", "a", &others, "--ranks", "3"]);
    assert_eq!((resharded.status, &*resharded.complaint), (0, ""));
    assert!(
        resharded
            .output
            .ends_with("2 tensors with 12 B in 3 files\n"),
        "{}",
        resharded.output
    );
    let here = scratch.folder("a");
    let diff = run(&["checkpoint", "diff", here.to_str().unwrap(), &others]);
    assert_eq!(diff.status, 0, "{}", diff.output);
    let export = ["checkpoint", "export", &others, "--full", &full];
    let exported = run(&export);
    assert_eq!(exported.status, 0, "{}", exported.complaint);
    assert!(exported.complaint.contains("config.json was not written"));
    let file = fs::read(format!("{full}/model.safetensors")).unwrap();
    assert!(file.ends_with(&WEIGHT));
    let again = run(&export);
    assert_eq!(again.status, 2);
    assert!(again.complaint.ends_with("exists already\n"));
    let forced = run(&[
        &export[..],
        &["--force", "--json", "--max-shard-size", "1MB"],
    ]
    .concat());
    let forced: Value = serde_json::from_str(&forced.output).unwrap();
    assert_eq!(forced["files"], json!(["model.safetensors"]));
    let imported = run(&["checkpoint", "import", &full, &back, "--ranks", "2"]);
    assert_eq!(imported.status, 0, "{}", imported.complaint);
    let verified = run(&["checkpoint", "verify", &back, "imported"]);
    assert!(verified.output.starts_with("checkpoint imported: 2 files"));
    for path in [others, full, back] {
        fs::remove_dir_all(path).unwrap();
    }
}

#[test]
fn checkpoints_differ_by_their_elements_and_not_by_how_these_are_divided() {
    let scratch = Scratch::new("diff");
    scratch.save("a", 10, 1, WEIGHT);
    scratch.save("b", 20, 2, [1, 2, 3, 9, 9, 6, 7, 8]);
    scratch.save("c", 10, 1, WEIGHT);
    let diff = |a: &str, b: &str, json: &[&str]| {
        let folders = [scratch.folder(a), scratch.folder(b)].map(|path| path.display().to_string());
        let words = ["checkpoint", "diff", &folders[0], &folders[1]];
        run(
            words.iter().chain(json).copied(),
            &PythonFacts::default(),
            None,
        )
    };
    let found = diff("a", "b", &[]);
    assert_eq!(found.status, 1);
    let lines: Vec<&str> = found.output.lines().skip(3).collect();
    let expected = [
        "step: 10 in A and 20 in B",
        "pp x tp x rdp: 1 x 1 x 1 in A and 2 x 1 x 1 in B",
        "partition: 1 of 1 modules moved",
        "user content: other values of epoch",
        "elements: 2 of 8 of model/weight differ",
        "",
        "equal tensors: 1",
    ];
    assert_eq!(lines, expected);
    let same = diff("a", "c", &["--json"]);
    assert_eq!(same.status, 0);
    let same: Value = serde_json::from_str(&same.output).unwrap();
    assert_eq!(
        (&same["equal_tensors"], &same["job"]),
        (&json!(2), &json!([]))
    );
}
