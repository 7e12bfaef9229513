//! Pages that can be run: every fenced `sh` block, in order within its page, in one shell and one empty folder.
//!
//! Blocks marked `sh kafka` get `BROKERS`, the address of a real broker. On runbooks the `sql` blocks are asked of the
//! lake that the page has made. `console` and `text` blocks are only shown.

use std::env;
use std::fs;
use std::path::Path;
use std::time::Duration;

use gpufleet_tests::{kafka, programs};

const RUNBOOKS: &str = "docs/operating/runbooks";
/// Pages that are run, apart from the runbooks.
const PAGES: [&str; 3] = ["README.md", "docs/start.md", "docs/life_of_a_sample.md"];
/// How long a page may take: the longest has a demo and a broker that has to start.
const DEADLINE: Duration = Duration::from_secs(300);
/// Goes before the place of each block in the output.
const MARK: &str = "@@";

/// A fenced block of a page.
#[derive(Debug)]
struct Block {
    /// Line of the page on which the fence opens.
    line: usize,
    /// What stands behind the fence: `sh`, `sh kafka`, `sql`, `console`, ...
    info: String,
    text: String,
}

impl Block {
    fn runs(&self) -> bool {
        self.info == "sh" || self.info.starts_with("sh ")
    }

    /// Builds, or runs the tests themselves: too much for a test.
    fn builds(&self) -> bool {
        (self.runs() || self.info == "console") && (self.text.contains("cargo ") || self.text.contains("tests/run"))
    }
}

fn read(page: &str) -> String {
    fs::read_to_string(programs::workspace().join(page)).unwrap_or_else(|error| panic!("cannot read {page}: {error}"))
}

fn blocks(page: &str) -> Vec<Block> {
    blocks_of(&read(page)).unwrap_or_else(|line| panic!("{page}:{line}: the block has no end"))
}

/// The blocks of a text, or the line of the one that does not end.
fn blocks_of(text: &str) -> Result<Vec<Block>, usize> {
    let (mut found, mut open) = (Vec::new(), None::<Block>);
    for (index, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), open.take()) {
            (Some(info), None) => {
                open = Some(Block { line: index + 1, info: info.trim().to_owned(), text: String::new() });
            }
            (Some(_), Some(block)) => found.push(block),
            (None, Some(block)) => open = Some(Block { text: block.text + line + "\n", ..block }),
            (None, None) => {}
        }
    }
    open.map_or(Ok(found), |block| Err(block.line))
}

/// Runs a page. A failure names page and line of the block, and shows what was printed.
fn run(page: &str) {
    let blocks = blocks(page);
    let wanted: Vec<_> = blocks.iter().filter(|block| block.runs() && !block.builds()).collect();
    assert!(!wanted.is_empty(), "{page} has no sh block; it should show what it says");
    for block in &wanted {
        assert!(
            ["sh", "sh kafka"].contains(&block.info.as_str()),
            "{page}:{}: unknown mark {}",
            block.line,
            block.info
        );
    }
    let dir = tempfile::tempdir().expect("a folder");
    // Beside the folder, which is to be empty when the page begins.
    let scripts = tempfile::tempdir().expect("a folder");
    let mut script = "exec 2>&1\nset -euo pipefail\n".to_owned();
    for block in &wanted {
        script += &format!("echo '{MARK} {page}:{}'\n", block.line);
        if block.info == "sh kafka" {
            script += &format!("export BROKERS='{}'\n{}unset BROKERS\n", kafka::shared().bootstrap(), block.text);
        } else {
            script += &block.text;
        }
    }
    if page.starts_with(RUNBOOKS) {
        for block in blocks.iter().filter(|block| block.info == "sql") {
            let file = scripts.path().join(format!("{}.sql", block.line));
            fs::write(&file, &block.text).expect("a query can be written");
            let place = format!("echo '{MARK} {page}:{}'\n", block.line);
            script += &format!("{place}gpufleet sql --lake lake \"$(cat '{}')\"\n", file.display());
        }
    }
    let file = scripts.path().join("page.sh");
    fs::write(&file, script).expect("a script can be written");
    let output = shell(&file, dir.path());
    let reached = output.stdout.lines().rev().find_map(|line| line.strip_prefix(MARK)).unwrap_or(page).trim();
    assert_eq!(output.code, 0, "the block at {reached} failed\n{output}");
    assert!(!output.stdout.contains("panicked at"), "the page {page} shows a panic\n{output}");
}

fn shell(script: &Path, dir: &Path) -> programs::Output {
    // Asked for one by one: a missing program is to be said, and not to be found elsewhere on PATH.
    for name in ["gpufleet", "gpufleet-collector", "gpufleet-processor"] {
        let _ = programs::program(name);
    }
    let others = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([programs::folder()].into_iter().chain(env::split_paths(&others)));
    let mut command = programs::command("bash", &["-eu"], dir);
    command.arg(script).env("PATH", path.expect("a build folder has no colon in its name"));
    programs::finish(command, DEADLINE)
}

fn runbooks() -> Vec<String> {
    let folder = fs::read_dir(programs::workspace().join(RUNBOOKS)).expect("the runbooks are there");
    let names = folder.map(|entry| entry.expect("a folder can be listed").file_name().to_string_lossy().into_owned());
    let mut pages: Vec<_> =
        names.filter(|name| name.ends_with(".md")).map(|name| format!("{RUNBOOKS}/{name}")).collect();
    pages.sort();
    pages
}

#[test]
fn the_readme_runs() {
    run("README.md");
}

#[test]
fn the_readme_names_two_commands_and_no_more() {
    let building: Vec<_> = blocks("README.md").into_iter().filter(Block::builds).collect();
    let commands: Vec<_> = building
        .iter()
        .flat_map(|block| block.text.lines())
        .map(|line| line.split(" #").next().unwrap_or_default().trim().trim_start_matches("$ "))
        .filter(|line| !line.is_empty())
        .collect();
    assert_eq!(commands, ["cargo run --release", "tests/run"], "README.md promises two commands");
}

#[test]
fn the_start_page_runs() {
    run("docs/start.md");
}

#[test]
fn the_life_of_a_sample_runs() {
    run("docs/life_of_a_sample.md");
}

#[test]
fn the_runbooks_run_and_their_queries_are_answered() {
    let pages = runbooks();
    assert!(!pages.is_empty(), "there are no pages in {RUNBOOKS}");
    pages.iter().for_each(|page| run(page));
}

#[test]
fn no_page_has_an_sh_block_that_nothing_runs() {
    let run: Vec<String> = PAGES.iter().map(|&page| page.to_owned()).chain(runbooks()).collect();
    let pages = super::tidy::files().into_iter().filter(|path| path.ends_with(".md") && !run.contains(path));
    let found: Vec<_> = pages
        .flat_map(|page| {
            let blocks = blocks(&page).into_iter().filter(Block::runs);
            blocks.map(|block| format!("{page}:{}", block.line)).collect::<Vec<_>>()
        })
        .collect();
    assert!(found.is_empty(), "mark these as console, or run the page in tests/suite/docs.rs:\n{}", found.join("\n"));
}

#[test]
fn blocks_are_known_by_their_fences() {
    let found = blocks_of("a\n```sh kafka\nls\n\n```\nb\n```text\nx\n```\n").expect("both end");
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].line, found[0].info.as_str(), found[0].text.as_str()), (2, "sh kafka", "ls\n\n"));
    assert!(found[0].runs() && !found[1].runs());
    assert_eq!(blocks_of("```sh\nls\n").expect_err("no end"), 1);
}
